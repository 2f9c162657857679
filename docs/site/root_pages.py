"""Hook of mkdocs that adds pages outside docs/ to the site, and makes their links lead to pages of the site."""

import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

import chunkrt

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "bench/README.md",
    "bench/RESULTS.md": "bench/RESULTS.md",
    "examples/README.md": "examples/README.md",
    "examples/chunkrt-torch/README.md": "examples/chunkrt-torch/README.md",
    **{f"bench/results/{path.name}": f"bench/results/{path.name}" for path in ROOT.glob("bench/results/*.md")},
}


def on_config(config):
    version = chunkrt.__version__
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
            text = text.replace("](examples)", "](examples/README.md)")
            text = text.replace("](examples/chunkrt-torch)", "](examples/chunkrt-torch/README.md)")
        text = text.replace("](../docs/", "](../")
        if source == "examples/README.md":
            text = re.sub(r"\]\((\w+\.py)\)", rf"]({config['repo_url']}/blob/main/examples/\1)", text)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    if not page.file.generated_by:
        markdown = re.sub(r"\]\(\.\./(bench|examples)/", r"](\1/", markdown)
    if page.file.src_path == "api.md":
        sys.path.insert(0, str(Path(__file__).parent))
        from options import fields

        markdown = markdown.replace("<!-- fields of EngineOptions -->", fields())
    return markdown
