"""The files that an MJCF is made of, and hashes of them. Imports no simulator."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from embodied.core.user_files import sha256

ATTRIBUTE = re.compile(r"""\b(file\w*|meshdir|texturedir|assetdir)\s*=\s*["']([^"']*)["']""")


def referred_files(mjcf: Path) -> list[Path]:
    """Return the files that an MJCF may include or refer to, such as meshes, each once; a missing one is left out.

    Of a name all files count that it could mean in the folders that are named: which one it does depends on the
    simulator. The text is searched, because not everything that MuJoCo reads is XML by the standard.
    """
    documents, folders, names = [mjcf], [mjcf.parent], list[str]()
    for document in documents:
        for key, value in ATTRIBUTE.findall(document.read_text(encoding="utf-8", errors="replace")):
            if not key.startswith("file"):
                folders += [mjcf.parent / value, document.parent / value]
                continue
            names += [value, Path(value).name]
            parts = (folder / value for folder in (mjcf.parent, document.parent) if value.endswith((".xml", ".mjcf")))
            documents += [part for part in parts if part.is_file() and part not in documents]
        folders.append(document.parent)
    candidates = dict.fromkeys((folder / name).resolve() for name in names for folder in folders)
    return [path for path in candidates if path.is_file()]


def hashes(contents: Sequence[bytes], mjcfs: Sequence[Path]) -> tuple[str, ...]:
    """Return two hashes of each content: with the files that MJCFs refer to, and without."""
    files = "".join(sha256(file) for mjcf in mjcfs for file in referred_files(mjcf)).encode()
    return tuple(hashlib.sha256(content + more).hexdigest() for content in contents for more in (files, b""))
