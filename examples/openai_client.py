"""Start `chunkrt serve` and talk to it with OpenAI's client (pip install "chunkrt[serve]" openai).

python examples/openai_client.py [MODEL]
"""

import subprocess
import sys

from openai import OpenAI


def main(model: str) -> None:
    command = ["chunkrt", "serve", model, "--port", "0", "--name", "local"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stderr if " is served at " in line)
            url = line.partition(" is served at ")[2].split()[0]
            client = OpenAI(base_url=f"{url}/v1", api_key="none")
            stream = client.chat.completions.create(
                model="local",
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                temperature=0,
                stream=True,
            )
            for event in stream:
                print(event.choices[0].delta.content or "", end="", flush=True)
            print()
        finally:
            server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["smollm2-135m-instruct"])
