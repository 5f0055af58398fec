"""scripts.equivalence: it finds levers equal, and would find one that is not."""

import pytest

from longhaul.parallel import tiling
from scripts import equivalence


@pytest.mark.slow
def test_levers_are_equal_and_the_table_says_so(monkeypatch, capsys):
    monkeypatch.setattr(equivalence, "T", 48)  # of six blocks: a query still selects fewer
    monkeypatch.setitem(equivalence.BASE, "context_length", 48)
    assert equivalence.main(["--what", "levers", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "all good" in printed
    refused = [line.split("  ")[0] for line in printed.splitlines() if "refused: " in line]
    assert refused == ["head groups, indexed", "optimizer in backward, indexed"]
    assert printed.count("  equal\n") == 3 * len(equivalence.LEVERS) - len(refused)


def test_pairs_are_equal_or_refused_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(
        equivalence,
        "LEVERS",
        {
            name: equivalence.LEVERS[name]
            for name in ("selective checkpointing", "head groups", "tiled MLP")
        },
    )
    assert equivalence.main(["--what", "pairs", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.count("  equal\n") == 2 and "refused: --gradient_checkpointing selective" in printed
    )


@pytest.mark.slow
def test_a_wrong_lever_is_found(monkeypatch, capsys):
    right = tiling.recomputed_gradients

    def wrong(*args):
        return tuple(1.001 * x for x in right(*args))

    monkeypatch.setattr(tiling, "recomputed_gradients", wrong)
    monkeypatch.setattr(equivalence, "LEVERS", {"tiled MLP": dict(mlp_tiles=3)})
    assert equivalence.main(["--what", "levers", "--steps", "2"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_a_loss_that_is_no_number_is_not_equal(capsys):
    assert not equivalence.report(
        "later", [[1.0, float("nan")], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]
    )
    assert not equivalence.report(
        "first", [[1.0, 1.0], [float("nan"), 1.0]], [[1.0, 1.0], [1.0, 1.0]]
    )
    assert equivalence.report("none", [[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]])


def test_every_way_to_spread_is_in_the_table():
    cases = equivalence.spread()
    assert len(cases) == 4 * 3 * 4 and {case.ranks for case in cases} == {2, 4}
    for case in cases:
        equivalence.TrainConfig(**case.settings()).accumulation(case.ranks)


@pytest.mark.slow
def test_ranks_are_equal(monkeypatch, capsys):
    whole = equivalence.spread()
    monkeypatch.setattr(
        equivalence, "spread", lambda: [case for case in whole if case.ranks == 2][::7]
    )
    assert equivalence.main(["--what", "ranks", "--steps", "3"]) == 0
    assert capsys.readouterr().out.count("  equal\n") == 4
