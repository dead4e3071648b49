"""Time-outs, step limits and blame."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.errors import ConfigError
from planaria.runtime.membership.limits import (
    Timeouts,
    Whereabouts,
    blame,
    silence_limit,
    slowness,
    step_limit,
)

LIMITS = Timeouts().limits()


@pytest.mark.parametrize("timeout", [2, 5, 10, 29.9, 30, 60, 120, 600, 3600])
def test_every_timeout_keeps_the_order(timeout):
    limits = Timeouts(timeout=timeout).limits()
    assert limits.ping < limits.silence < limits.rebuild <= limits.transfer < limits.timeout
    assert limits.timeout < limits.no_spare < limits.collective
    assert limits.timeout == timeout
    assert limits.silence >= 0.5
    assert limits.silence >= 5 * limits.ping


def test_a_stopped_worker_is_noticed_within_two_seconds_by_default():
    assert 1.0 <= LIMITS.silence + LIMITS.ping <= 2.0


@pytest.mark.parametrize("timeout", [1.9, 0, -3, math.inf, math.nan])
def test_a_timeout_out_of_range_is_refused(timeout):
    with pytest.raises(ConfigError) as error:
        Timeouts(timeout=timeout)
    assert str(error.value) == (f"timeout is {timeout:g} seconds: give a number of at least 2")


def test_a_step_is_limited_by_its_median_and_spread():
    steady = [2.0] * 20
    assert step_limit(steady, phase="step", limits=LIMITS) == (
        16.0,
        "16 s: the median of 20 steps is 2 s, their spread 0 s",
    )
    restless = [1.0, 3.0] * 10
    seconds, reason = step_limit(restless, phase="step", limits=LIMITS)
    assert seconds == pytest.approx(8 * 2 + 10 * 1.4826)
    assert reason == "30.8 s: the median of 20 steps is 2 s, their spread 1.48 s"


def test_one_slow_step_does_not_move_the_limit_and_old_ones_are_forgotten():
    usual, _ = step_limit([2.0] * 40, phase="step", limits=LIMITS)
    assert step_limit([2.0] * 39 + [500.0], phase="step", limits=LIMITS)[0] == usual
    assert step_limit([500.0] * 60 + [2.0] * 50, phase="step", limits=LIMITS)[0] == usual


def test_a_short_step_has_a_third_of_the_timeout():
    assert step_limit([0.01] * 20, phase="step", limits=LIMITS)[0] == LIMITS.timeout / 3


def test_phases_that_are_longer_by_nature_have_longer_limits():
    history = [1.0] * 20
    usual = step_limit(history, phase="step", limits=LIMITS)[0]
    longer = {
        phase: step_limit(history, phase=phase, limits=LIMITS)[0]
        for phase in ("first", "compile", "evaluation", "checkpoint", "data")
    }
    assert min(longer.values()) > usual
    assert longer["first"] == longer["compile"] == 600
    assert step_limit([], phase="step", limits=LIMITS)[0] == 600
    assert step_limit([1.0] * 4, phase="step", limits=LIMITS)[0] == 600
    assert step_limit(history, phase="idle", limits=LIMITS) == (
        math.inf,
        "an idle worker has no limit",
    )


def test_an_unknown_phase_is_refused():
    with pytest.raises(ConfigError) as error:
        step_limit([1.0] * 9, phase="lunch", limits=LIMITS)
    assert str(error.value) == (
        "phase is 'lunch': give step, first, compile, evaluation, checkpoint, data or idle"
    )


def test_a_quiet_machine_gives_the_configured_silence_and_a_starved_one_more():
    quiet, starved = slowness([0.01] * 40), slowness([0.1, 1.0] * 20)
    assert (quiet, starved) == (0.01, 1.0)
    assert silence_limit(quiet, [quiet] * 3, limits=LIMITS) == (1.5, "1.5 s")
    assert silence_limit(None, [], limits=LIMITS) == (1.5, "1.5 s")
    assert silence_limit(starved, [quiet], limits=LIMITS) == (
        6.0,
        "6 s: nine of ten of its own last answers took up to 1 s",
    )
    assert silence_limit(None, [2.0, 0.5, 1.0], limits=LIMITS) == (
        6.0,
        "6 s: nine of ten of the others' last answers took up to 1 s",
    )
    # One or two that are slow by themselves, or silent, say nothing of the machine.
    assert silence_limit(quiet, [9.0, quiet], limits=LIMITS)[0] == 1.5
    assert silence_limit(quiet, [9.0, 9.0, quiet, quiet], limits=LIMITS)[0] == 1.5
    assert silence_limit(20.0, [], limits=LIMITS)[0] == LIMITS.timeout


def test_few_or_old_answers_and_single_late_ones_do_not_count():
    assert slowness([9.0] * 4) is None
    assert slowness([9.0] * 5) == 9.0
    assert slowness([9.0] * 100 + [0.1] * 40) == 0.1
    assert slowness([0.1] * 36 + [9.0] * 4) == 0.1


DELAYS = st.lists(st.floats(0, 1e4), max_size=60)


@given(DELAYS, st.lists(st.floats(0, 1e4), max_size=5), st.floats(2, 3600))
def test_a_silence_is_never_shorter_than_configured_nor_longer_than_the_timeout(
    own, others, timeout
):
    limits = Timeouts(timeout=timeout).limits()
    mine = slowness(own)
    seconds, why = silence_limit(mine, others, limits=limits)
    assert limits.silence <= seconds <= limits.timeout
    assert why
    # More patience is never the answer to quicker answers.
    quicker = slowness([delay / 2 for delay in own])
    assert silence_limit(quicker, [d / 2 for d in others], limits=limits)[0] <= seconds
    assert (mine is None) == (len(own) < 5)
    if mine is not None:
        assert sum(delay > mine for delay in own[-40:]) <= len(own[-40:]) / 10


def where(*, answered=100.0, collective=7, inside=True, waiting=False, patience=0.0):
    return Whereabouts(
        answered=answered,
        collective=collective,
        inside=inside,
        waiting=waiting,
        patience=patience,
    )


def test_silence_is_blamed_before_anything_else():
    owners = {
        "a": where(inside=False, collective=1),
        "b": where(answered=98.0),
        "c": where(answered=97.0),
    }
    assert blame(owners, now=100.2, limits=LIMITS) == (
        "c",
        "c has not answered a ping for 3.2 s (limit 1.5 s)",
    )
    # A longer silence that is allowed is none.
    owners["c"] = where(answered=97.0, patience=6.0)
    assert blame(owners, now=100.2, limits=LIMITS)[0] == "b"


def test_who_is_outside_while_others_wait_is_blamed():
    owners = {
        "a": where(),
        "b": where(inside=False, collective=7),
        "c": where(inside=False, collective=6),
    }
    assert blame(owners, now=100.2, limits=LIMITS) == (
        "c",
        "c is in no collective, 1 of 3 owners wait in one (c has entered 6)",
    )


def test_the_fewest_collectives_are_blamed_where_all_wait_or_nobody_does():
    for inside in (True, False):
        owners = {
            "a": where(inside=inside, collective=9),
            "b": where(inside=inside, collective=8),
        }
        assert blame(owners, now=100.0, limits=LIMITS) == (
            "b",
            "b has entered 8 collectives, others up to 9",
        )


def test_nobody_is_blamed_where_nobody_stands_out():
    assert blame({"a": where(), "b": where()}, now=100.0, limits=LIMITS) == (
        None,
        "all 2 owners wait in the same collective: nobody stands out",
    )
    assert blame({"a": where(inside=False)}, now=100.0, limits=LIMITS) == (
        None,
        "all 1 owners compute: nobody stands out",
    )
    assert blame({}, now=100.0, limits=LIMITS) == (None, "there are no owners")


def test_who_waits_for_protection_is_never_blamed_for_the_wait():
    waits = where(inside=False, waiting=True, collective=6)
    assert blame({"a": where(), "b": waits}, now=100.0, limits=LIMITS) == (
        None,
        "1 of 2 owners wait for protection and the others wait in the same collective: nobody "
        "stands out",
    )
    assert blame({"a": waits, "b": waits}, now=100.0, limits=LIMITS) == (
        None,
        "all 2 owners wait for protection and nothing is sent: nobody stands out",
    )
    owners = {"a": waits, "b": where(inside=False), "c": waits}
    assert blame(owners, now=100.0, limits=LIMITS) == (
        "b",
        "b is in no collective, 2 of 3 owners wait for its state to be protected (b has entered 7)",
    )
    owners = {"a": waits, "b": where(answered=90.0, inside=False, waiting=True)}
    assert blame(owners, now=100.0, limits=LIMITS)[0] == "b"
