"""Text output of a search for a quantisation scheme."""

from __future__ import annotations

from collections.abc import Iterator

from chunkrt.compile.search import Choice

NUM_SHOWN = 12


def choice_lines(choice: Choice) -> Iterator[str]:
    """Return the linear layers that 8 bits hurt most, the frontier, and the cost and loss of the choice."""
    loss = choice.loss
    width = max(len(linear.weight) for linear in choice.linears) - len(".weight")
    yield f"{'linear':{width}}  {'reach':>8}  {'KL at 8 bits':>12}  {'with shadow':>12}  chosen"
    ranking = sorted(choice.linears, key=lambda linear: -linear.kl)
    for linear in ranking[:NUM_SHOWN]:
        shadowed = "-" if linear.kl_shadowed is None else f"{linear.kl_shadowed:.6f}"
        chosen = f"w{linear.weight_bits}a{linear.activation_bits}{', shadow' if linear.has_shadow else ''}"
        name = linear.weight.removesuffix(".weight")
        yield f"{name:{width}}  {linear.reach:8.0f}  {linear.kl:12.6f}  {shadowed:>12}  {chosen}"
    if len(ranking) > NUM_SHOWN:
        yield f"... and {len(ranking) - NUM_SHOWN} more; --json has all"
    yield ""
    yield f"{'multiply-adds at 8 bits':>23}  {'shadows':>7}  {'4-bit':>5}  {'mean KL':>9}  {'perplexity':>10}"
    for point in choice.frontier:
        share = f"{100 * point.share_in_8_bits:.1f} %"
        mark = "  <- chosen" if (point.kl, point.perplexity_ratio) == (loss.kl, loss.perplexity_ratio) else ""
        measured = f"{point.kl:9.5f}  {point.perplexity_ratio:9.4f}x"
        yield f"{share:>23}  {point.num_shadows:7}  {point.num_with_4_bits:5}  {measured}{mark}"
    shadows = [linear for linear in choice.linears if linear.has_shadow]
    work = sum(linear.shadow_multiply_adds for linear in shadows) / sum(
        linear.multiply_adds for linear in choice.linears
    )
    yield ""
    yield (
        f"{choice.scheme.name}: mean KL {loss.kl:.5f} of at most {choice.budget:g} on the calibration text, "
        f"perplexity {loss.perplexity_ratio:.4f} of float's"
    )
    yield (
        f"shadows: {len(shadows)} of {len(choice.linears)} linear layers, "
        f"{sum(linear.shadow_bytes for linear in shadows) / 1e6:.2f} MB of rows in float32, "
        f"{100 * work:.2f} % of the linear layers' multiply-adds"
    )
