"""What a codec has left out, from one worker process to the next: a file of tensors in the worker's data directory.

The file is taken away when it is read, so that nothing is added twice. Everything here blocks.
"""

from __future__ import annotations

import logging
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from w5xde_async.worker.uplink import Uplink

__all__ = ["keep", "take_up"]

logger = logging.getLogger(__name__)


def keep(uplink: Uplink, data_dir: Path | None, run_id: str) -> None:
    """The worker leaves: write what was left out, or say how much is dropped."""
    uplink.cut()
    feedback = uplink.feedback
    if feedback is None:
        return
    state = feedback.state_dict()
    if data_dir is not None and state:
        path = _path(data_dir, run_id)
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            save_file(state, str(partial), metadata={"codec": uplink.codec.name})
            partial.replace(path)
        except OSError as error:
            logger.warning("what the codec left out was not kept path=%s error=%s", path, error)
        else:
            logger.info("what the codec left out is kept path=%s", path)
            return
    dropped = uplink.drop()
    if dropped.num_buckets:
        logger.warning("what the codec left out is dropped norm=%.4g buckets=%d", dropped.norm, dropped.num_buckets)


def take_up(uplink: Uplink, data_dir: Path | None, run_id: str) -> None:
    """Go on from what an earlier worker kept, if it did."""
    feedback = uplink.feedback
    if data_dir is None or feedback is None:
        return
    path = _path(data_dir, run_id)
    try:
        state = load_file(str(path))
        path.unlink()
    except FileNotFoundError:
        return
    except (OSError, SafetensorError) as error:
        logger.warning("what was kept cannot be read path=%s error=%s", path, error)
        return
    try:
        feedback.load_state_dict(state)
    except ValueError as error:
        logger.warning("what was kept does not fit path=%s error=%s", path, error)


def _path(data_dir: Path, run_id: str) -> Path:
    plain = "".join(character for character in run_id if character.isalnum())[:64]
    return data_dir / f"residual-{plain}.safetensors"
