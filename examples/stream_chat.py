"""Stream the answers of a conversation, each turn prefilling only its new tokens.

python examples/stream_chat.py [MODEL]
"""

import sys

import chunkrt


def main(model: str) -> None:
    messages: list[dict[str, str]] = []
    with chunkrt.load(model, context_length=2048, progress=True) as engine, engine.session() as session:
        tokenizer = engine.tokenizer
        for question in ("What is the capital of France?", "What is 2 + 2?"):
            messages.append({"role": "user", "content": question})
            tokens = tokenizer.encode_chat(messages)
            shared = next(
                (i for i, pair in enumerate(zip(session.tokens, tokens, strict=False)) if pair[0] != pair[1]),
                min(len(session.tokens), len(tokens) - 1),
            )
            session.rewind(shared)
            result = session.prefill(tokens[shared:])
            print(f"> {question}")
            answer = ""
            for piece in session.generate(max_new_tokens=64):
                print(piece, end="", flush=True)
                answer += str(piece)
            print(f"\n[{result.num_tokens} of {len(tokens)} tokens prefilled, {result.num_cached} cached]")
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:] or ["smollm2-135m-instruct"])
