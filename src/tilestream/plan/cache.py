"""Plans on disk, so that a second process starts warm. JSON files, one a plan; a file can be lost, not believed.

``plan.chooser`` names them, by all that decides.
"""

from __future__ import annotations

import hashlib
import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilestream.errors import CacheError
from tilestream.files import keep
from tilestream.ir.serialise import pipeline_from_json, pipeline_to_json
from tilestream.plan.candidates import Candidate, Plan

log = logging.getLogger(__name__)


def versions() -> dict[str, str]:
    """What else a plan depends on: torch, its CUDA, the driver, and tilestream's own sources."""
    import torch

    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "tilestream": _sources()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = _driver()
    return found


@lru_cache(maxsize=1)
def _driver() -> str:
    """The driver's version as its kernel module states it; empty where it does not (Windows)."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return ""


@lru_cache(maxsize=1)
def _sources() -> str:
    """A hash of the files that decide plans and kernels: their change makes old plans void without a new version."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cuh", ".cu", ".jinja", ".j2")):
        stat = path.stat()
        digest.update(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


class PlanCache:
    """Plans by key in ``folder``/plans. Safe with several processes: files appear whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder) / "plans"

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def load(self, name: str) -> Plan | None:
        """The plan, or None if there is none or it cannot be read; what cannot be read is logged and made anew."""
        found = load_sealed(self.path(name))
        try:
            return None if found is None else plan_from_json(found)
        except CacheError as error:
            log.warning("ignoring the cached plan %s, it will be made anew: %s", self.path(name), error)
            return None

    def store(self, name: str, made: Plan) -> None:
        """Write the plan under its key."""
        store_sealed(self.path(name), plan_to_json(made))


def load_sealed(path: Path) -> Any:
    """What ``store_sealed`` wrote there; None if there is nothing, or, which is logged, if it cannot be read."""
    try:
        return sealed(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, CacheError) as error:
        log.warning("ignoring %s, it will be made anew: %s", path, error)
        return None


def store_sealed(path: Path, data: dict[str, Any]) -> None:
    """Write ``data`` with its digest, as ``files.keep`` does; ``path`` lies in a folder of its kind, in the cache's."""
    keep(path, json.dumps(seal(data)).encode(), "plans are not kept:")


def seal(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` with a digest: a flipped bit can turn one legal plan into another."""
    return {"digest": _digest(data), "plan": data}


def sealed(file: Any) -> Any:
    """The data of a file that ``seal`` made.

    Raises:
        CacheError: the digest does not fit.
    """
    if not isinstance(file, dict) or file.get("digest") != _digest(file.get("plan")):
        raise CacheError("the file's digest does not fit what it holds", "delete the file")
    return file["plan"]


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def plan_to_json(made: Plan) -> dict[str, Any]:
    """A plan as JSON data; ``plan_from_json`` gives it back equal."""
    candidates = [
        {**vars(c), "pipeline": None if c.pipeline is None else pipeline_to_json(c.pipeline)} for c in made.candidates
    ]
    return {**vars(made), "candidates": candidates, "chosen": made.candidates.index(made.chosen)}


def plan_from_json(data: Any) -> Plan:
    """The plan that ``data`` describes.

    Raises:
        CacheError: the data is not what ``plan_to_json`` writes.
    """
    try:
        each = [(c, c["pipeline"]) for c in data["candidates"]]
        candidates = tuple(Candidate(**{**c, "pipeline": p and pipeline_from_json(p)}) for c, p in each)
        return Plan(**{**data, "candidates": candidates, "chosen": candidates[data["chosen"]]})
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise CacheError(f"not a plan: {error!r}", "delete the file") from error
