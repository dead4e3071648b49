"""The simulation runs the real membership, at any size, and says what it did."""

import pytest

from planaria.errors import ConfigError
from planaria.runtime.membership.cluster import ClusterConfig
from planaria.runtime.membership.simulate import main, run


def test_thousands_of_events_at_64_shards_break_no_rule():
    result = run(shards=64, events=30_000, seed=1)
    assert (result.events, result.shards, result.seed) == (30_000, 64, 1)
    assert result.swaps > 20
    assert result.superseded > 10
    assert result.generations > 50
    assert 1 <= result.most_redone <= 2
    assert 0 < result.step_seconds < result.seconds


def test_the_same_seed_gives_the_same_events():
    one, two = (run(shards=4, events=5_000, seed=3) for _ in range(2))
    other = run(shards=4, events=5_000, seed=4)
    assert (one.epochs, one.swaps, one.ends) == (two.epochs, two.swaps, two.ends)
    assert (one.epochs, one.swaps, one.ends) != (other.epochs, other.swaps, other.ends)
    assert one.ends["finished"] > 0


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_small_worlds_are_simulated_to_their_ends(shards):
    result = run(shards=shards, events=8_000, seed=shards)
    assert result.runs > 1
    assert result.swaps > 10
    assert set(result.ends) <= {"finished", "cannot be brought back", "times in step"}


def test_an_ordinary_event_costs_the_same_at_16_384_shards():
    """Forming, building and a generation or two; a hundred times the shards, not the time."""
    result = run(shards=16_384, events=50_000, seed=0)
    assert result.ordinary < 1e-3
    assert result.epochs >= 1


def test_the_command_prints_one_line(capsys):
    assert main(["--events", "2000", "--shards", "6", "--seed", "2"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("2,000 events at 6 shards (seed 2) in ")
    assert "no rule broken" in line
    assert line.count("\n") == 1


def test_bad_input_gets_one_line(capsys):
    assert main(["--shards", "0"]) == 2
    assert capsys.readouterr().err == "shards is 0: a simulation needs at least 1\n"
    assert main(["--events", "0"]) == 2
    assert capsys.readouterr().err == "events is 0: give at least 1\n"
    with pytest.raises(ConfigError) as error:
        ClusterConfig(shards=3, replicas=2)
    assert str(error.value) == "replicas is 2: give a divisor of the 3 shards"
    with pytest.raises(ConfigError) as error:
        ClusterConfig(shards=3, per_node=0)
    assert str(error.value) == "per_node is 0: give at least 1 worker for a node"
