"""Writes docs/settings.md from the declared settings: every flag, variable, TOML key, default and meaning.

    python docs/make_settings.py            # write it
    python docs/make_settings.py --check    # exit 1 where it is not current

A test runs the check. torch is not imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from w5xde_async import status
from w5xde_async.settings import PROGRAMS
from w5xde_async.settings.flags import Program, declared

PAGE = Path(__file__).with_name("settings.md")
HEAD = """\
# Settings

<!-- Written by docs/make_settings.py; change the declarations, not this page. -->

Each program's settings are one table. A setting is given as an argument, as an environment variable or in the TOML file
of `--config`; arguments win over the environment, the environment over TOML, that over the default. Empty variables
count as not set. Underscores in flags are accepted. Times: `90`, `90s`, `5m`, `1h30m`. Sizes: `512KiB`, `4MiB`, `1GB`.
Paths may begin with `~`. `--print-config` prints what results, in the form that `--config` reads. What a coordinator or
worker in another program can use of them stands in fields of `CoordinatorConfig` and `WorkerConfig` ([api.md](api.md);
[embedding.md](embedding.md) says which are named otherwise), which read no environment.

```toml
[coordinator]
port = 5555
checkpoint_every = 200
max_time = "2h"

[worker]
threads = 2
```
"""
TAIL = """\
## Other variables

| variable | read by | meaning |
|---|---|---|
| `W5XDE_TOKEN` | all programs | the shared secret itself; no flag takes it, since other users can list arguments |
| `W5XDE_DASHBOARD_LINK` | status | the dashboard's link as it was printed, with its token and its certificate's hash |
| `OMP_NUM_THREADS` | coordinator, torch | threads of each local worker, where `--worker-threads` is not given |
| `CUDA_VISIBLE_DEVICES` | torch | which GPUs a worker may see |
| `NO_COLOR` | all programs | any value: no colours |
| `TERM` | all programs | `dumb`: no colours, no bar |
| `W5XDE_FAILPOINTS` | coordinator | for tests: ends the process at named points ([reliability.md](reliability.md)) |

The secret is looked for in this order: join file or `W5XDE_JOIN`; `--token-file`; `W5XDE_TOKEN`; `W5XDE_TOKEN_FILE` or
`token_file` of the TOML file; `~/.config/w5xde/token`. Files must be readable by their owner
alone (root's: by a group too, as a container is given them).
"""


def tables(programs: Sequence[type[Program]] = PROGRAMS) -> Iterator[str]:
    for program in programs:
        yield f"\n## `w5xde {program.table}`\n\nThe same as `python -m w5xde_async.{program.table}`."
        yield f" TOML table: `[{program.table}]`.\n"
        group = ""
        for row in declared(program).values():
            if row.setting.hidden:
                continue
            if row.setting.group != group:
                group = row.setting.group
                yield f"\n### {group[:1].upper()}{group[1:]}: {program.table}\n\n"
                yield "| flag, variable, TOML key | default | meaning | give |\n|---|---|---|---|\n"
            names = [f"`{name}`" for name in (row.usage, row.variable, row.name)[: 3 if row.in_toml else 2]]
            told = row.setting
            cells = ["<br>".join(names), code_flags(row.shown), code_flags(told.meaning), told.kind.accepts]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    yield "\n## `w5xde status`\n\nThe same as `python -m w5xde_async.status`. Arguments alone.\n\n"
    yield "| flag | meaning |\n|---|---|\n"
    for action in status.parser("status")._actions:
        flag = " ".join(name for name in (action.option_strings[-1], action.metavar) if name)
        yield f"| `{flag}` | {code_flags(action.help or '')} |\n"
    yield "\n" + TAIL


def code_flags(text: str) -> str:
    return re.sub(r"--[a-z][a-z-]*[a-z]", r"`\g<0>`", text)


def main(arguments: list[str]) -> int:
    text = HEAD + "".join(tables())
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write("docs/settings.md is not current: run python docs/make_settings.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
