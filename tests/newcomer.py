"""Follows README.md to the letter: an empty clone, a new virtual environment, an empty home, no variables.

    python tests/newcomer.py             # as a newcomer: everything is installed anew, which takes minutes
    python tests/newcomer.py --borrow    # packages that this Python's environment has are not installed again

Every block that is marked ``run`` or ``file=`` is taken in the order of the page, in one shell: ``file=NAME`` is
written, ``python run`` is written to example.py and run, ``sh run`` is run; with ``background`` the shell goes on
meanwhile; with ``elsewhere copy=FILE`` it is run in another directory, which FILE is copied to as soon as it is
there. What is cloned is the last commit. Exit code: the shell's.

``--borrow`` is for continuous integration, which has just installed everything into an empty checkout by
``make setup``: the new environment then finds those packages beside its own, and installs this one alone.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900
LEFT_BY_A_RUN = ("model.safetensors", "metrics.jsonl", "config.toml", "checkpoints")
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def script(text: str) -> str:
    """The page as a shell script. Raises ValueError for a page without commands."""
    lines = ["set -eu", "say() { printf '\\n== %s\\n' \"$1\"; }"]
    num_commands = 0
    for language, info, body in _BLOCK.findall(text):
        marks = dict(mark.partition("=")[::2] for mark in info.split())
        if language == "python" and "file" in marks:
            lines.append(_written(marks["file"], body))
        elif language == "python" and "run" in marks:
            lines += [_written("example.py", body), "say 'python example.py'", "python example.py"]
        elif language == "sh" and "run" in marks:
            num_commands += 1
            # Not in a subshell: what the block sets, such as an activated environment, is there for the next.
            block = [f"say {shlex.quote(body.strip())}", body.rstrip()]
            if "background" in marks:
                lines += ["{", *block, "} &", "beside=$!"]
            elif "elsewhere" in marks:
                source = shlex.quote(marks["copy"])
                lines += [
                    f"until [ -s {source} ]; do kill -0 $beside || [ -s {source} ]; sleep 0.1; done",
                    f"mkdir ../elsewhere && cp {source} ../elsewhere/",
                    "(cd ../elsewhere", *block, ")", "wait $beside",
                ]  # fmt: skip
            else:
                lines += block
    if not num_commands:
        raise ValueError("the page has no block marked `sh run`")
    return "\n".join(lines) + "\n"


def _written(name: str, body: str) -> str:
    return f"cat > {shlex.quote(name)} <<'END OF THE BLOCK'\n{body}END OF THE BLOCK"


def environment(home: Path) -> dict[str, str]:
    """Nothing but a path, an empty home, and where pip and TLS find what every machine must be told."""
    passed = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_")) or "_proxy" in key}
    path = ":".join(["/usr/local/bin", "/usr/bin", "/bin", str(Path(sys.base_prefix) / "bin")])
    return passed | {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb"}


def borrow(clone: Path) -> None:
    """An environment that sees this Python's packages, though not this checkout's own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    own = next(clone.glob(".venv/lib/python*/site-packages"))
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        place, clone, home = Path(folder), Path(folder, "clone"), Path(folder, "home")
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
        if "--borrow" in arguments:
            borrow(clone)
        text = script((clone / "README.md").read_text(encoding="utf-8"))
        shell = subprocess.Popen(["bash", "-c", text], cwd=clone, env=environment(home), start_new_session=True)
        try:
            code = shell.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            try:  # whatever was left beside it
                os.killpg(shell.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            shell.wait()
        runs = sorted(run for run in (clone / "runs").glob("*") if run.is_dir())
        missing = [f"{run.name}/{name}" for run in runs for name in LEFT_BY_A_RUN if not (run / name).exists()]
        strangers = [path.name for path in place.iterdir() if path.name not in ("clone", "home", "elsewhere")]
    sys.stdout.write(f"\n{len(runs)} runs, exit code {code}, {time.monotonic() - began:.0f} s\n")
    if missing or strangers or not runs:
        sys.stdout.write(f"missing: {missing}, left behind: {strangers}\n")
        return code or 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
