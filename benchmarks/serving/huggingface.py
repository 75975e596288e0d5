"""Hugging Face `generate` behind the part of OpenAI's API that the benchmark asks for. Requests wait for each other."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.streamers import BaseStreamer


class _Steps(BaseStreamer):
    """Passes on the tokens of each step."""

    def __init__(self, write: Callable[[list[int]], None]) -> None:
        self._write, self._has_prompt = write, False

    def put(self, value: Tensor) -> None:
        """value: first the prompt, then what a step added, any shape."""
        if self._has_prompt and value.numel():
            self._write(value.flatten().tolist())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing to do."""


class _Handler(BaseHTTPRequestHandler):
    model: Any
    tokenizer: Any
    lookup: int  # tokens that a draft copies from the text; 0: no drafts

    def do_GET(self) -> None:
        """Answer /health."""
        self.send_response(200)
        self.end_headers()

    @torch.inference_mode()
    def do_POST(self) -> None:
        """Answer /v1/completions with a stream of as many tokens as were asked for."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = self.tokenizer(body["prompt"], return_tensors="pt")
        temperature = body["temperature"]
        config = GenerationConfig(
            max_new_tokens=body["max_tokens"],
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=0 if temperature else None,
            pad_token_id=0,
            prompt_lookup_num_tokens=self.lookup or None,
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        written = 0

        def write(tokens: list[int]) -> None:
            nonlocal written
            written += len(tokens)
            self._send({"choices": [{"index": 0, "text": self.tokenizer.decode(tokens) or " "}]})

        self.model.generate(**prompt, generation_config=config, streamer=_Steps(write))
        self._send({"choices": [], "usage": {"completion_tokens": written}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@click.command()
@click.option("--model", required=True)
@click.option("--tokenizer", required=True)
@click.option("--dtype", required=True)
@click.option("--threads", type=int, required=True)
@click.option("--lookup", type=int, default=0)
@click.option("--host", required=True)
@click.option("--port", type=int, required=True)
def main(model: str, tokenizer: str, dtype: str, threads: int, lookup: int, host: str, port: int) -> None:
    """Load a checkpoint, and serve it until ended."""
    torch.set_num_threads(threads)
    _Handler.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    _Handler.model.generation_config = (
        GenerationConfig()
    )  # without an end: the benchmark's answers never end by themselves
    _Handler.tokenizer, _Handler.lookup = AutoTokenizer.from_pretrained(tokenizer), lookup
    HTTPServer((host, port), _Handler).serve_forever()


if __name__ == "__main__":
    main()
