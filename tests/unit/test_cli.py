"""The command line: what it understands, and the one line and exit code of each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import planaria
from planaria import cli
from planaria.runtime.inject import PHASES


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


LINES = [
    (["stat"], "'stat' is no command of planaria; did you mean status?"),
    (
        ["xyzzy"],
        "'xyzzy' is no command of planaria; choose one of run, join, status, doctor, demo, "
        "train, plan-comm, faith, slide",
    ),
    (["faith"], "planaria faith is not whole; choose one of score, select, meta, exemplars, view"),
    (
        ["run", "--fresh", "--resume", "SCRIPT"],
        "fresh and resume are both given: give --fresh to begin anew, or --resume to go on",
    ),
    (["train", "lm"], "'lm' is no command of planaria train; did you mean llm?"),
    (["run"], "no script given; write planaria run [options] train.py [its arguments]"),
    (
        ["run", "--workers", "2"],
        "no script given; write planaria run [options] train.py [its arguments]",
    ),
    (["run", "nothere.py"], "script nothere.py does not exist; give the path of a Python file"),
    (["run", "."], "script . is a folder; give the path of a Python file"),
    (["run", "--workers", "0", "SCRIPT"], "workers is 0: give 1 to 16384"),
    (["run", "--spares", "-1", "SCRIPT"], "spares is -1: give 0 to 16384"),
    (
        ["run", "--port", "70000", "SCRIPT"],
        "port is 70000: give 1 to 65535, or 0 for any free port",
    ),
    (["run", "--timeout", "0.5", "SCRIPT"], "timeout is 0.5 s: give 2 to 86400 seconds"),
    (
        ["run", "--max-redo", "0", "SCRIPT"],
        "max_redo is 0: give 1 or 2; the interrupted step itself counts",
    ),
    (
        ["run", "--max-redo", "3", "SCRIPT"],
        "max_redo is 3: give 1 or 2; the interrupted step itself counts",
    ),
    (
        ["run", "--host", "::1", "SCRIPT"],
        "host is '::1': give an IPv4 address or the name of this machine; the workers' groups do "
        "not speak IPv6",
    ),
    (
        ["run", "--preload", "nummpy", "SCRIPT"],
        "preload 'nummpy' is no module that can be imported; check its name",
    ),
    (
        ["run", "--bogus", "SCRIPT"],
        "Unrecognized options: --bogus, SCRIPT; run planaria run --help",
    ),
    (
        ["demo", "--json", "nowhere/a.json"],
        "json nowhere/a.json cannot be written; give a file in a folder that exists",
    ),
    (
        ["status", ".", "--client-certificate", "SCRIPT", "--client-key", "SCRIPT"],
        "client_certificate is given without ca; give the PEM file of the authority that signed the "
        "coordinator's certificate, too",
    ),
    (
        ["join", "127.0.0.1:1", "--token-file", "TWO", "SCRIPT"],
        "token file TWO does not hold one line of ASCII; give the coordinator.token of the run",
    ),
    (
        ["join", "127.0.0.1:1", "--token-file", "RAW", "SCRIPT"],
        "token file RAW is no text; give the coordinator.token of the run",
    ),
    (["run", "--max-restarts", "-1", "SCRIPT"], "max_restarts is -1: give 0 or more"),
    (["run", "--threads", "-2", "SCRIPT"], "threads is -2: give 1 or more, or 0 to leave it open"),
    (
        ["run", "--worker", "2", "SCRIPT"],
        "Unrecognized options: --worker, 2; did you mean --workers?; run planaria run --help",
    ),
    (
        ["run", "--workers", "two", "SCRIPT"],
        "Error parsing --workers: invalid literal for int() with base 10: 'two'; "
        "see planaria run --help",
    ),
    (
        ["run", "--on-no-spare", "never", "SCRIPT"],
        "invalid choice 'never' for argument '--on-no-spare'. Expected one of ('wait', 'end'); "
        "run planaria run --help",
    ),
    (
        ["run", "--inject", "kill:worker=0,step=1,phase=lunch", "SCRIPT"],
        "fault 'kill:worker=0,step=1,phase=lunch': phase 'lunch' is unknown; use data, forward, "
        "backward, collective, optimizer, capture, replicate, commit",
    ),
    (
        ["run", "--inject", "stop:worker=3,step=1,phase=data", "--workers", "3", "SCRIPT"],
        "fault 'stop:worker=3,step=1,phase=data': worker 3 does not exist; "
        "this run has workers 0 to 2",
    ),
    (
        ["run", "--certificate", "x.pem", "SCRIPT"],
        "TLS certificate is given without its key; give both PEM files",
    ),
    (
        ["run", "--ca", "nothere.pem", "SCRIPT"],
        "TLS ca nothere.pem cannot be read; give a readable PEM file",
    ),
    (
        ["join", "--", "SCRIPT"],
        "Missing from planaria join: STR The run's folder, or HOST:PORT of its coordinator. "
        "(required); run planaria join --help",
    ),
    (
        ["join", "nowhere", "SCRIPT"],
        "'nowhere' is neither the folder of a run nor HOST:PORT of its coordinator",
    ),
    (
        ["join", "127.0.0.1:1", "SCRIPT"],
        "127.0.0.1:1 asks for the run's token; give --token-file "
        "(the run keeps it in OUT/coordinator.token)",
    ),
    (
        ["join", "127.0.0.1:1", "--token-file", "nothere", "SCRIPT"],
        "token file nothere cannot be read: No such file or directory; give the coordinator.token of "
        "the run",
    ),
    (
        ["demo", "--steps", "20"],
        "steps is 20: give more than 20, the step in which the worker is killed",
    ),
    (
        ["train", "llm", "--model", "gpt9"],
        "model: 'gpt9' is unknown; choose one of gpt2-tiny, gpt2-small, gpt2-medium, llama-tiny, "
        "llama-demo, llama-1m, llama-30m, llama-500m, llama-1.8b",
    ),
]


@pytest.mark.parametrize(("words", "line"), LINES, ids=[" ".join(w) for w, _ in LINES])
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], script: str, words: list[str], line: str
) -> None:
    two, raw = Path(script).with_name("two"), Path(script).with_name("raw")
    two.write_text("a token\nand more\n")
    raw.write_bytes(b"\xff\xfe")
    files = {"SCRIPT": script, "TWO": str(two), "RAW": str(raw)}
    code, out, err = run(capsys, *(files.get(word, word) for word in words))
    for name, path in files.items():
        line = line.replace(name, path)
    assert err == f"planaria: {line}\n"
    assert out == ""
    assert code == 2


def test_nothing_is_written_for_bad_input(
    capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, _, _ = run(capsys, "run", "--workers", "0", "--out", str(out), script)
    assert code == 2
    assert not out.exists()


def test_out_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    code, _, err = run(capsys, "run", "--out", str(out), script)
    assert err == (
        f"planaria: out {out} cannot be written (Not a directory); give another folder with --out\n"
    )
    assert code == 2


def test_debug_shows_the_traceback_and_keeps_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(capsys, "--debug", "run", "nothere.py")
    assert code == 2
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("script nothere.py does not exist; give the path of a Python file\n")


@pytest.mark.parametrize(
    ("words", "options", "script"),
    [
        (["train.py"], [], ["train.py"]),
        (
            ["--workers", "4", "train.py", "--lr", "1"],
            ["--workers", "4"],
            ["train.py", "--lr", "1"],
        ),
        (["--workers=4", "train.py", "--workers", "9"], ["--workers=4"], "train.py --workers 9"),
        (["--quiet", "--no-refill", "a.py", "-x"], ["--quiet", "--no-refill"], ["a.py", "-x"]),
        (["--quiet", "--", "a.py", "--", "b"], ["--quiet"], ["a.py", "--", "b"]),
        (["--inject", "kill:x", "--inject", "y", "a.py"], "--inject kill:x --inject y", ["a.py"]),
        (["--workers"], ["--workers"], []),
    ],
)
def test_script_takes_what_follows_it(
    words: list[str], options: list[str] | str, script: list[str] | str
) -> None:
    expected = tuple(x.split() if isinstance(x, str) else x for x in (options, script))
    assert cli.split(words, cli.Run) == expected


def test_join_takes_its_target_first() -> None:
    words = ["--spares", "2", "1.2.3.4:5", "--quiet", "a.py", "--lr", "1"]
    expected = (["--spares", "2", "1.2.3.4:5", "--quiet"], ["a.py", "--lr", "1"])
    assert cli.split(words, cli.Join) == expected
    words = ["1.2.3.4:5", "--", "a.py", "--lr", "1"]
    assert cli.split(words, cli.Join) == (["1.2.3.4:5"], ["a.py", "--lr", "1"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"planaria {planaria.__version__}\n", "")


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_help_names_every_command(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    for command in cli.commands():
        assert f"planaria {' '.join(command.words)} " in out


def test_help_is_shown_after_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--workers", "2", "--help"])
    assert caught.value.code == 0
    assert "planaria run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["run"], "usage: planaria run [options] train.py [its arguments]"),
        (["join"], "usage: planaria join OUT|HOST:PORT [options] -- train.py [its arguments]"),
    ],
)
def test_help_names_the_script(
    capsys: pytest.CaptureFixture[str], words: list[str], usage: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    out = capsys.readouterr().out
    assert out.splitlines()[0] == usage
    if words == ["run"]:
        plain = " ".join(out.replace("│", " ").split())
        assert "node=N in the place of worker=W hits a whole machine" in plain
        assert f"Phases: {', '.join(PHASES)}." in plain


def test_help_is_fast_and_imports_no_torch() -> None:
    program = (
        "import sys; from planaria import cli; code = cli.main(['--help']);"
        "import planaria.runtime.launch;"
        "assert code == 0; assert 'torch' not in sys.modules"
    )
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    assert time.monotonic() - begin < 3.0  # 0.1 s on an idle core; the bound is for a busy machine


def test_doctor_tells_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor", "--json")
    lines = {line["name"]: line for line in json.loads(out)}
    assert (code, err) == (0, "")
    assert lines["python"]["state"] == "ok"
    assert lines["gloo"]["state"] == "ok"
    assert lines["pidfd"]["state"] == "ok"
    assert "MiB/s over TCP" in lines["loopback"]["found"]
    for line in lines.values():
        assert (line["state"] == "ok") == (line["remedy"] == ""), line
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "parent-death signal" in out


def test_help_of_a_group_names_its_commands_only(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "slide", "--help")
    assert code == 0
    assert "planaria slide tile" in out
    assert "planaria run" not in out


def test_names_of_other_trainers_lead_to_ours(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "train", "llm", "--learning-rate", "1")
    assert code == 2
    assert err.rstrip().endswith("; did you mean --lr?")


def test_plan_comm_reads_numbers_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan-comm", "--workers", "4", "--mbit", "1000", "--compute", "1", "--params"]
    code, out, _ = run(capsys, *words, "345M")
    assert code == 0
    assert out.startswith("345,000,000 weights, ")
    assert " GB " in out
    code, out, _ = run(capsys, *words, "1e6")
    assert (code, out[:10]) == (0, "1,000,000 ")
    code, _, err = run(capsys, *words, "1.5")
    assert code == 2
    assert "params" in err
