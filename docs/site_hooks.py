"""Hooks of mkdocs: README.md is the first page, every module has a page, and links to sources lead to these pages."""

import glob
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[([^]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def page_of_source() -> dict[str, str]:
    """Return the page of every public module by the module's path in the repository."""
    found = {}
    for path in sorted(glob.glob("embodied/**/*.py", root_dir=ROOT, recursive=True)):  # follows the links in embodied/
        if not Path(path).stem.startswith("_"):
            source = (ROOT / path).resolve().relative_to(ROOT)
            found[str(source)] = f"api/{path.removesuffix('.py').replace('/', '.')}.md"
    return found


def on_files(files, config):
    """Add the generated pages."""
    modules = {page: page.removeprefix("api/").removesuffix(".md") for page in page_of_source().values()}
    pages = {page: f"# {name}\n\n::: {name}\n" for page, name in modules.items()}
    pages["api/index.md"] = "# API\n\n" + "".join(f"- [{name}]({name}.md)\n" for name in modules.values())
    pages["index.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links between files of the repository into links between pages; one to any other file becomes its text."""
    uri = page.file.src_uri
    here = "README.md" if uri == "index.md" else f"docs/{uri}"
    pages = {**page_of_source(), "README.md": "index.md"}

    def convert(link):
        target = normpath(join(dirname(here), link[2]))
        found = target.removeprefix("docs/") if target.startswith("docs/") else pages.get(target)
        return f"[{link[1]}]({relpath(found, dirname(uri) or '.')}{link[3] or ''})" if found else link[1]

    return LINK.sub(convert, markdown)
