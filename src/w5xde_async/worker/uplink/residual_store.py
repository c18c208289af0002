"""What a codec has left out, from one worker process to the next: files of tensors in the workers' data directory.

Workers may share the directory. Each writes a file of its own, ``residual-RUN-NAME-WORKER.safetensors``, and one that
joins takes up one file of its run: that of its own name if there is one, else the oldest, since what one worker left
out is as good for another. Files of an island's ranks are ``residual-RUN.SHARD-...``, for ranks of the same shard. A
file is taken by renaming it, so that nothing is added twice. There are never more files of a run than workers have
computed for it here at once; the run's end removes them, and those of a run of which nobody here saw the end go after
``_STALE_S``. Everything here blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from w5xde_async.errors import CheckpointCorrupt
from w5xde_async.params.flat import digest
from w5xde_async.store.filesystem import regular
from w5xde_async.store.tensors import read_metadata, read_tensors
from w5xde_async.worker.uplink.result_encoder import ResultEncoder

logger = logging.getLogger(__name__)

_STALE_S = 14 * 86400.0
_DIGEST = "digest"  # in a file's metadata: of its tensors
_KEPT, _TAKEN = ".safetensors", ".taken"


def keep(encoder: ResultEncoder, data_dir: Path | None, *, run_id: str, name: str, worker_id: str) -> None:
    """The worker leaves: write what was left out, or say how much is dropped."""
    encoder.cut()
    feedback = encoder.feedback
    if feedback is None:
        return
    state = feedback.state_dict()
    if data_dir is not None and state:
        path = data_dir / f"{_of_run(run_id, encoder)}{_plain(name)}-{worker_id}{_KEPT}"
        partial = path.with_suffix(".partial")
        try:
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sweep(data_dir)
            save_file(state, str(partial), metadata={"codec": encoder.codec.name, _DIGEST: _digest(state)})
            partial.chmod(0o600)  # what is left of gradients tells of the data
            partial.replace(path)
        except (OSError, SafetensorError) as error:  # the latter for a full disk
            with suppress(OSError):
                partial.unlink()
            logger.warning("what the codec left out was not kept path=%s error=%s", path, error)
        else:
            logger.info("what the codec left out is kept path=%s", path)
            return
    encoder.drop()


def take_up(encoder: ResultEncoder, data_dir: Path | None, *, run_id: str, name: str, worker_id: str) -> None:
    """Go on from what an earlier worker kept, if one did."""
    feedback = encoder.feedback
    if data_dir is None or feedback is None:
        return
    path = _take(data_dir, _of_run(run_id, encoder), name, worker_id)
    if path is None:
        return
    try:
        feedback.load_state_dict(_read(path))
    except (OSError, CheckpointCorrupt) as error:
        logger.warning("what was kept cannot be read path=%s error=%s", path, error)
        return
    except ValueError as error:
        logger.warning("what was kept does not fit path=%s error=%s", path, error)
    with suppress(OSError):  # nobody takes it up again
        path.unlink()


def _read(path: Path) -> dict[str, Tensor]:
    """Raises OSError, CheckpointCorrupt."""
    with open(path, "rb", opener=regular) as file:
        nbytes = file.seek(0, 2)
        file.seek(0)
        told = read_metadata(file, nbytes).get(_DIGEST)
        file.seek(0)
        state = read_tensors(file, nbytes, lambda _: None)
    if _digest(state) != told:  # values that nobody left out would count as this worker's
        raise CheckpointCorrupt(str(path), "does not match its digest")
    return state


def _digest(state: Mapping[str, Tensor]) -> str:
    return digest([state[name] for name in sorted(state)])


def forget(data_dir: Path | None, run_id: str) -> None:
    """The run is finished: nobody has a use for what was left out any more."""
    if data_dir is not None:
        for path in data_dir.glob(f"residual-{_plain(run_id)}[-.]*"):
            with suppress(OSError):
                path.unlink()


def _take(data_dir: Path, beginning: str, name: str, worker_id: str) -> Path | None:
    own = f"{beginning}{_plain(name)}-"
    kept = [(not path.name.startswith(own), age, path) for age, path in _files(data_dir, f"{beginning}*{_KEPT}")]
    for *_, path in sorted(kept):
        taken = path.with_name(f"{path.stem}-{worker_id}{_TAKEN}")
        with suppress(OSError):  # another was faster
            path.rename(taken)
            return taken
    return None


def _sweep(data_dir: Path) -> None:
    long_ago = time.time() - _STALE_S
    for written, path in _files(data_dir, "residual-*"):
        if written < long_ago:
            with suppress(OSError):
                path.unlink()


def _files(data_dir: Path, pattern: str) -> list[tuple[float, Path]]:
    """When each was written, and the file."""
    found: list[tuple[float, Path]] = []
    for path in data_dir.glob(pattern):
        with suppress(OSError):  # another has taken it
            found.append((path.stat().st_mtime, path))
    return found


def _of_run(run_id: str, encoder: ResultEncoder) -> str:
    """How the names of the files begin that are of use here."""
    return f"residual-{_plain(run_id)}{'.' if encoder.shard else ''}{encoder.shard}-"


def _plain(text: str) -> str:
    return "".join(character for character in text if character.isalnum())[:64]
