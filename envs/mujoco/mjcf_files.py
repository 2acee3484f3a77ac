"""The files that an MJCF is made of, and a hash of them. Imports no simulator."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from embodied.core.user_files import sha256

FOLDERS = ("assetdir", "meshdir", "texturedir")  # attributes of <compiler>


def referred_files(mjcf: Path) -> Iterator[Path]:
    """Yield the files that an MJCF includes or refers to, such as meshes, each once; a missing one is left out."""
    documents, folders, seen = [mjcf], [mjcf.parent], set[Path]()
    for document in documents:
        try:
            root = ElementTree.parse(document).getroot()
        except ElementTree.ParseError:  # the simulator says what is wrong with it
            continue
        given = (compiler.get(key) for compiler in root.iter("compiler") for key in FOLDERS)
        folders += [document.parent, *(mjcf.parent / folder for folder in given if folder)]
        for element in root.iter():
            for name in (value for key, value in element.items() if key.startswith("file")):
                found = next((path for folder in folders if (path := folder / name).is_file()), None)
                if found is not None and found not in seen:
                    seen.add(found)
                    yield found
                    if element.tag in ("include", "model"):
                        documents.append(found)


def hashes(content: bytes, mjcfs: Sequence[Path]) -> tuple[str, str]:
    """Return hashes of a content, with and without the files that MJCFs refer to; the same where they refer to none."""
    files = "".join(sha256(file) for mjcf in mjcfs for file in referred_files(mjcf))
    with_files, without = (hashlib.sha256(content + more).hexdigest() for more in (files.encode(), b""))
    return with_files, without
