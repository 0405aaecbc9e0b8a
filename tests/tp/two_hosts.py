"""Two hosts with a cable between them: network namespaces, which need no rights to make."""

from __future__ import annotations

import subprocess
from types import TracebackType

NEAR, FAR = "10.77.0.1", "10.77.0.2"

_SETUP = f"""
set -e
mount -t tmpfs none /run
ip netns add far
ip link add near type veth peer name there netns far
ip addr add {NEAR}/30 dev near
ip -n far addr add {FAR}/30 dev there
ip link set near up
ip link set lo up
ip -n far link set there up
ip -n far link set lo up
echo done
exec cat
"""


class TwoHosts:
    """A near and a far host; both are gone when the block ends.

    Attributes:
        failure: Why this machine cannot have them, or nothing.
    """

    def __init__(self) -> None:
        command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _SETUP]
        self.failure = ""
        try:
            self._keeper = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except FileNotFoundError as error:
            self.failure = str(error)
            return
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "done\n":
            self.failure = self._keeper.communicate()[1]

    @property
    def near(self) -> list[str]:
        """What to put before a command that shall run on the near host."""
        place = ["--target", str(self._keeper.pid), "--user", "--net", "--mount"]
        return ["nsenter", *place, "--preserve-credentials"]

    @property
    def far(self) -> list[str]:
        """What to put before a command that shall run on the far host."""
        return [*self.near, "ip", "netns", "exec", "far"]

    def unplug(self) -> None:
        """Cut the cable; nobody is told."""
        subprocess.run([*self.near, "ip", "link", "set", "near", "down"], check=True)

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.failure:
            self._keeper.communicate()  # it ends with its input
