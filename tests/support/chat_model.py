"""A tiny chat model, whose template writes one letter per role."""

import json

from fixture_checkpoints import checkpoint

from chunkrt.compile.compiler import compile_checkpoint
from chunkrt.engine_directory.manifest import write_manifest
from chunkrt.quant.scheme import SCHEMES, Recipe

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def write_chat_model(folder, **settings):
    """Write an engine directory of the model, optionally with text settings, and return the folder."""
    recipe = Recipe(scheme=SCHEMES["w8a8-dynamic"])
    compile_checkpoint(checkpoint("llama_biased_gguf"), recipe, {}, folder, model="toy")
    path = folder / "text.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE, "chat_adds_bos": False} | settings)
    )
    write_manifest(folder, model="toy", scheme=recipe.scheme)
    return folder
