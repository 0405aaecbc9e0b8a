from __future__ import annotations

import json
import re
from pathlib import Path

from minisgl_server.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "docs/grafana/minisgl.json"


def test_the_dashboard_asks_only_for_metrics_that_exist() -> None:
    document = json.loads(DASHBOARD.read_text())
    expressions = [t["expr"] for panel in document["panels"] for t in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"minisgl:\w+", text)}
    metrics = Metrics()
    exported = set(re.findall(r"^(minisgl:\w+)", metrics.render().decode(), re.MULTILINE))
    assert len(asked) >= 10
    assert asked - exported == set()
