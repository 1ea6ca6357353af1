"""Datasets from local files in the form that they are published in, else from the hub."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from locks.models import SetupError

Record = dict[str, Any]


class Source(NamedTuple):
    """Where a dataset is on the hub, and what of it: a file, or a member of a zip file."""

    repository: str
    file: str
    member: str | None = None


def records(path: Path | None, name: str, source: Source, needs: tuple[str, ...]) -> list[Record]:
    """The records of one file of a dataset.

    Args:
        path: the file, or a directory with `name`.jsonl, .json or .parquet; None for the hub.
        name: of the file, without its ending.
        source: where it is on the hub.
        needs: fields that every record has.

    Raises:
        SetupError: no file and no hub, or a file of another form; names what was looked for.
    """
    if path is None:
        file, member = _from_hub(name, source)
    else:
        file, member = _local(path, name), None
    try:
        found = _parse(file, member)
    except (ValueError, KeyError, OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{name}: {file} cannot be read: {' '.join(str(error).split())}") from error
    for number, record in enumerate(found):
        lacking = [field for field in needs if not isinstance(record, dict) or field not in record]
        if lacking:
            raise SetupError(
                f"{name}: {file}, record {number}: expected fields {', '.join(needs)}, no {lacking[0]}"
            )
    if not found:
        raise SetupError(f"{name}: {file} holds no record")
    return found


def _local(path: Path, name: str) -> Path:
    if path.is_file():
        return path
    looked = [path / f"{name}{ending}" for ending in (".jsonl", ".json", ".parquet")]
    for file in looked:
        if file.is_file():
            return file
    raise SetupError(f"{name}: no data, looked for {', '.join(map(str, looked))}")


def _from_hub(name: str, source: Source) -> tuple[Path, str | None]:
    from httpx import HTTPError
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        got = hf_hub_download(source.repository, source.file, repo_type="dataset")
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, HTTPError, OSError) as error:
        raise SetupError(
            f"{name}: no data, and {source.file} of {source.repository} cannot be had from the hub: give {name}.jsonl, "
            "or its directory, with --data"
        ) from error
    return Path(got), source.member


def _parse(file: Path, member: str | None) -> list[Record]:
    if member is not None:
        with zipfile.ZipFile(file) as archive:
            return _lines(archive.read(member).decode("utf-8"))
    if file.suffix == ".parquet":
        return _parquet(file)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return json.loads(text)
    return _lines(text)


def _lines(text: str) -> list[Record]:
    # Not splitlines: texts may hold the other characters that it splits at.
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _parquet(file: Path) -> list[Record]:
    import pandas as pd

    try:
        table = pd.read_parquet(file)
    except ImportError as error:
        raise SetupError(
            f"{file}: reading parquet needs pyarrow: pip install pyarrow, or give JSON lines"
        ) from error
    return table.to_dict("records")
