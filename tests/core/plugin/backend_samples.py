"""Throw-away distributions with backends: a good one, and each way to be broken."""

from __future__ import annotations

from tests.core.plugin.throwaway import Throwaway

SPEC = """
    from minisgl.plugin.spec import Availability, BackendSpec, Capabilities, PLUGIN_API
"""

FAULTY_KINDS = {
    "attention": "Attention",
    "cache": "Cache",
    "kernels": "Kernels",
    "moe": "MoE",
}

GOOD = Throwaway(
    "acme-good",
    {
        "acme_good.py": SPEC
        + """
    from typing import Annotated
    from pydantic import Field
    from minisgl.config.fields import SettingsSection

    class GoodSettings(SettingsSection):
        '''How good attends.'''
        num_splits: int = Field(0, ge=0, le=8, description="Parts. Read by good.")

    ATTENTION = BackendSpec(
        api=PLUGIN_API,
        factory="acme_good_backend:build",
        summary="good at everything",
        aliases=("goodie",),
        settings=GoodSettings,
        probe=lambda context: Availability(True, "of course", priority=7),
        capabilities=Capabilities(page_sizes=(16, 64)),
    )
    """,
        "acme_good_backend.py": """
    def build(config):
        return ("built", config)
    """,
        "acme_good_hooks.py": """
    from minisgl.plugin.commands import Subcommand
    from minisgl.plugin.hookspecs import hookimpl

    SEEN = []

    @hookimpl
    def minisgl_subcommands():
        SEEN.append("subcommands")
        return [
            Subcommand("hello", "say hello", "acme_good_hooks:hello"),
            Subcommand("interrupted", "get Ctrl-C", "acme_good_hooks:interrupted"),
        ]

    @hookimpl
    def minisgl_step_finished(step):
        SEEN.append(step)

    @hookimpl
    def minisgl_engine_ready():
        SEEN.append("ready")

    def hello(context):
        return 7

    def interrupted(context):
        raise KeyboardInterrupt
    """,
    },
    {
        "minisgl": {"good": "acme_good_hooks"},
        "minisgl.attention": {"good": "acme_good:ATTENTION"},
    },
)

FEW = Throwaway(
    "acme-few",
    {
        "acme_few.py": SPEC
        + """
    from minisgl.plugin.spec import SMALL_DECODE_REQS

    def probe(context):
        is_best = context.phase == "decode" and context.decode_reqs == SMALL_DECODE_REQS
        return Availability(True, priority=9 if is_best else -1)

    ATTENTION = BackendSpec(api=PLUGIN_API, factory="acme_few:build", probe=probe)

    def build(config):
        return config
    """
    },
    {"minisgl.attention": {"few": "acme_few:ATTENTION"}},
)

RAISES = Throwaway(
    "acme-raises",
    {"acme_raises.py": "raise RuntimeError('the library\\nis broken')"},
    {
        "minisgl": {"raises": "acme_raises"},
        "minisgl.attention": {"raises": "acme_raises:ATTENTION"},
    },
)

EXITS = Throwaway(
    "acme-exits",
    {"acme_exits.py": "import sys; sys.exit(3)"},
    {"minisgl": {"exits": "acme_exits"}, "minisgl.attention": {"exits": "acme_exits:ATTENTION"}},
)

FUTURE = Throwaway(
    "acme-future",
    {
        "acme_future.py": SPEC
        + """
    ATTENTION = BackendSpec(api=PLUGIN_API + 1, factory="acme_future:no")
    """
    },
    {"minisgl.attention": {"future": "acme_future:ATTENTION"}},
)

STALE = Throwaway(
    "acme-stale",
    {"acme_stale.py": ""},
    {"minisgl": {"stale": "acme_stale"}, "minisgl.attention": {"stale": "acme_stale:ATTENTION"}},
    removed=("acme_stale.py",),
)

RENAMED = Throwaway(
    "acme-renamed",
    {"acme_renamed.py": "NEW_NAME = 1"},
    {"minisgl.attention": {"renamed": "acme_renamed:OLD_NAME"}},
)

NOT_A_SPEC = Throwaway(
    "acme-not-a-spec",
    {"acme_not_a_spec.py": "ATTENTION = {'api': 1}"},
    {"minisgl.attention": {"dict": "acme_not_a_spec:ATTENTION"}},
)


def _twin(letter: str, page_size: int) -> Throwaway:
    module = f"acme_twin_{letter}"
    text = f"""
    ATTENTION = BackendSpec(
        api=PLUGIN_API,
        factory="{module}:build",
        capabilities=Capabilities(page_sizes=({page_size},)),
    )

    def build(config):
        return "{letter}"
    """
    return Throwaway(
        f"acme-twin-{letter}",
        {f"{module}.py": SPEC + text},
        {"minisgl.attention": {"twin": f"{module}:ATTENTION"}},
    )


TWIN_A = _twin("a", 32)
TWIN_B = _twin("b", 48)

BROKEN_FACTORY = Throwaway(
    "acme-broken-factory",
    {
        "acme_broken_factory.py": SPEC
        + """
    ATTENTION = BackendSpec(
        api=PLUGIN_API,
        factory="acme_broken_backend:build",
        probe=lambda context: Availability(True, priority=99),
    )
    """,
        "acme_broken_backend.py": "raise OSError('libcudart.so.12: cannot open')",
    },
    {"minisgl.attention": {"broken": "acme_broken_factory:ATTENTION"}},
)

BAD_PROBE = Throwaway(
    "acme-bad-probe",
    {
        "acme_bad_probe.py": SPEC
        + """
    def explode(context):
        raise ZeroDivisionError("half a GPU")

    RAISES = BackendSpec(api=PLUGIN_API, factory="no:no", probe=explode)
    SAYS_NO = BackendSpec(
        api=PLUGIN_API, factory="no:no", probe=lambda context: Availability(False, "needs a moon")
    )
    """,
    },
    {"minisgl.cache": {"says-no": "acme_bad_probe:SAYS_NO", "explodes": "acme_bad_probe:RAISES"}},
)

NEEDY = Throwaway(
    "acme-needy",
    {
        "acme_needy.py": SPEC
        + """
    CACHE = BackendSpec(api=PLUGIN_API, factory="builtins:print")
    """
    },
    {"minisgl.cache": {"needy": "acme_needy:CACHE"}},
    requires=("minisgl-core<0.1", "acme-nowhere", "acme-extra; extra == 'more'"),
)

KINDRED = Throwaway(
    "acme-kindred",
    {
        "acme_kindred.py": SPEC
        + """
    from pydantic import Field
    from minisgl.config.fields import SettingsSection

    class Shared(SettingsSection):
        '''Read by two backends.'''
        size: int = Field(1, ge=1, le=8, description="Size. Read by both.")

    class Other(SettingsSection):
        '''Read by one.'''
        size: int = Field(2, ge=1, le=8, description="Size. Read by it.")

    def make(settings):
        return BackendSpec(api=PLUGIN_API, factory="no:no", settings=settings)

    SHARED, OTHER = make(Shared), make(Other)
    """
    },
    {
        "minisgl.moe": {"both": "acme_kindred:SHARED", "clash": "acme_kindred:SHARED"},
        "minisgl.comm": {"both": "acme_kindred:SHARED", "clash": "acme_kindred:OTHER"},
        "minisgl.policy": {"cache": "acme_kindred:OTHER"},
    },
)

BAD_SETTINGS = Throwaway(
    "acme-bad-settings",
    {
        "acme_bad_settings.py": SPEC
        + """
    from typing import Annotated
    from pydantic import Field
    from minisgl.config.fields import Setting, SettingsSection

    class Required(SettingsSection):
        '''Has no default.'''
        size: int = Field(ge=1, le=8, description="Size. Read by it.")

    class TakesAName(SettingsSection):
        '''Takes the flag of another.'''
        size: Annotated[int, Setting(flags=("--tp",))] = Field(
            1, ge=1, le=8, description="Size. Read by it."
        )

    def make(settings):
        return BackendSpec(api=PLUGIN_API, factory="builtins:print", settings=settings)

    REQUIRED, TAKES_A_NAME, NO_MODEL = make(Required), make(TakesAName), make(dict)
    """
    },
    {
        "minisgl.cache": {
            "required": "acme_bad_settings:REQUIRED",
            "takes-a-name": "acme_bad_settings:TAKES_A_NAME",
            "no-model": "acme_bad_settings:NO_MODEL",
        }
    },
)

_FAULTY_BACKENDS = """
    import logging

    from minisgl.attention.torch_backend import TorchAttentionBackend
    from minisgl.core import get_global_ctx
    from minisgl.kvcache.naive import NaiveCache
    from minisgl.moe.torch_backend import TorchMoEBackend
    from minisgl.ops.contract import KernelSet
    from minisgl.ops.torch_ops import rms_norm

    def refuse_users():
        if any(req.uid >= 0 for req in get_global_ctx().batch.reqs):  # others warm up
            raise RuntimeError("the library\\nis broken")

    class Attention(TorchAttentionBackend):
        def forward(self, q, layer_id, batch):
            refuse_users()
            return super().forward(q, layer_id, batch)

        def init_graph(self, max_batch_size):
            raise RuntimeError("the library\\nis broken")

    class MoE(TorchMoEBackend):
        def __init__(self, config):
            super().__init__(config)
            logging.getLogger("acme").warning("took memory")

        def forward(self, *inputs):
            refuse_users()
            return super().forward(*inputs)

    class Kernels(KernelSet):
        def __init__(self, config):
            pass

        def ops(self):
            def norm(*inputs):
                refuse_users()
                return rms_norm(*inputs)

            return {"rms_norm": norm}

    class Cache(NaiveCache):
        def match_prefix(self, token_ids):
            raise RuntimeError("the library\\nis broken")
"""

FAULTY = Throwaway(
    "acme-faulty",
    {
        "acme_faulty.py": SPEC
        + "".join(
            f"""
    {kind.upper()} = BackendSpec(api=PLUGIN_API, factory="acme_faulty_{kind}:{name}")
    """
            for kind, name in FAULTY_KINDS.items()
        ),
        **{f"acme_faulty_{kind}.py": _FAULTY_BACKENDS for kind in FAULTY_KINDS},
    },
    {f"minisgl.{kind}": {"faulty": f"acme_faulty:{kind.upper()}"} for kind in FAULTY_KINDS},
)

BACKEND_SAMPLES = (
    BAD_SETTINGS,
    FEW,
    GOOD,
    RAISES,
    EXITS,
    FAULTY,
    FUTURE,
    STALE,
    RENAMED,
    NOT_A_SPEC,
    TWIN_A,
    TWIN_B,
    BROKEN_FACTORY,
    BAD_PROBE,
    NEEDY,
    KINDRED,
)
