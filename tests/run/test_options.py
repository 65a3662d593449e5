"""Options: defaults, ranges, contradictions, suggestions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilestream.errors import OptionError
from tilestream.options import Options, parse


def test_defaults():
    assert parse(None) == parse({}) == Options()
    assert Options().target == "auto" and Options().strategy == "auto" and Options().fallback


def test_options_pass_through():
    options = Options(strategy="spatial")
    assert parse(options) is options
    assert parse({"strategy": "spatial", "queue_depth": 4}) == options.with_(queue_depth=4)
    assert hash(options) == hash(Options(strategy="spatial"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stratgy": "bulk"}, "did you mean 'strategy'"),
        ({"zzz": 1}, "use one of: target"),
        ({"strategy": "spacial"}, "did you mean 'spatial'"),
        ({"target": "gpu"}, "use one of: auto, cuda, reference"),
        ({"measure": 1}, "measure=True or False"),
        ({"queue_depth": 3}, "even number"),
        ({"queue_depth": 0}, "even number"),
        ({"queue_depth": True}, "even number"),
        ({"queue_depth": 4, "strategy": "vertical"}, "contradicts strategy"),
        ({"cache": False, "cache_dir": "somewhere"}, "contradicts cache_dir"),
        ({"cache_dir": 3}, "not a path"),
        ({"device": 90}, "not a name"),
    ],
)
def test_bad_options_say_what_to_do(given: dict[str, object], says: str):
    with pytest.raises(OptionError, match=says):
        parse(given)


def test_changes_are_checked_too():
    with pytest.raises(OptionError, match="did you mean 'measure'"):
        Options().with_(mesure=False)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESTREAM_CACHE_DIR", "named")
    assert Options().cache_folder == Path("named")
    assert parse({"cache_dir": "given"}).cache_folder == Path("given")
    monkeypatch.delenv("TILESTREAM_CACHE_DIR")
    assert Options().cache_folder == Path.home() / ".cache" / "tilestream"
