"""The table of docs/distributed.md is that of the result file it names, and the file is what `plan` says today."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "distributed.md").read_text()
[NAME] = set(re.findall(r"`(benchmarks/results/\S+-plan-70b\.json)`", PAGE))
RESULT = json.loads((ROOT / NAME).read_text())


def gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def test_table_of_the_page() -> None:
    rows = {(row["cards"], row["tokens"], row["policy"]): row for row in RESULT["rows"]}
    lines = [line.strip("| ").split(" | ") for line in re.findall(r"^\| \d+ \| \d+ .*$", PAGE, re.MULTILINE)]
    assert {(int(cards), int(tokens)) for cards, tokens, *_ in lines} == {(c, t) for c, t, _ in rows}
    for cards, tokens, sharded, gathered, *totals in lines:
        kept, checkpointed, reverse = (
            rows[int(cards), int(tokens), policy] for policy in ("kept", "checkpointed", "reversed")
        )
        assert [sharded, gathered] == [gib(kept["sharded"]), gib(kept["gathered"])]
        assert totals == [gib(row["total"]) for row in (kept, checkpointed, reverse)]


def test_result_is_what_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pairs tell what a reversed stack of any depth holds, and what each further pair adds to the others."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_70b

    two, three = plan_70b.per_token(2), plan_70b.per_token(3)
    assert three["reversed"] == RESULT["per_token"]["reversed"]
    further = plan_70b.DEPTH - 3
    for policy in ("kept", "checkpointed"):
        assert three[policy] + further * (three[policy] - two[policy]) == RESULT["per_token"][policy]
