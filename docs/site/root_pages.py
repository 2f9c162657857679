"""A hook of mkdocs: pages that lie outside docs/ are pages of the site, and their links lead to its own."""

import re
import tomllib
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench/README.md",
    "bench/RESULTS.md": "bench/RESULTS.md",
    "examples/chunkrt-torch/README.md": "examples/chunkrt-torch/README.md",
}


def on_config(config):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    config["site_name"] = f"chunkrt {version}"
    config["site_dir"] = str(Path(config["site_dir"]) / version)
    return config


def on_files(files, config):
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if "/" not in source:
            text = re.sub(r"\]\(docs/", "](", text)
            for other, target in PAGES.items():
                text = text.replace(f"]({other})", f"]({target})")
            text = text.replace("](examples/chunkrt-torch)", "](examples/chunkrt-torch/README.md)")
        text = text.replace("](../docs/", "](../")
        files.append(File.generated(config, page, content=text))
    return files
