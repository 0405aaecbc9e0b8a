"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse

from minisgl_server.api.completions import asking, chat_prompt, check_model
from minisgl_server.api.errors import ApiError
from minisgl_server.api.requests import read_model
from minisgl_server.api.schemas import DetokenizeRequest, TokenizeRequest
from minisgl_server.engine_client import Prompt
from minisgl_server.state import ServerState


class TextRoutes:
    """Text to tokens and back, without generating."""

    def __init__(self, state: ServerState) -> None:
        """Serve with ``state``."""
        self._state = state

    async def tokenize(self, request: Request) -> JSONResponse:
        """Tokenize a prompt or a conversation, as generating would."""
        body = await read_model(request, TokenizeRequest, self._state.settings.max_body_size)
        check_model(self._state, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
        prompt: Prompt = (
            body.prompt if body.prompt is not None else chat_prompt(body, self._state.chat_template)
        )
        reply = await asking(self._state.client.count(prompt, body.add_special_tokens))
        content = {
            "tokens": reply.token_ids,
            "count": len(reply.token_ids),
            "max_model_len": self._state.facts.max_seq_len,
            "token_strs": reply.tokens if body.return_token_strs else None,
        }
        return JSONResponse(content)

    async def detokenize(self, request: Request) -> JSONResponse:
        """Turn token ids into text."""
        body = await read_model(request, DetokenizeRequest, self._state.settings.max_body_size)
        check_model(self._state, body.model)
        decoding = self._state.client.decode(body.tokens, body.skip_special_tokens)
        text = await asking(decoding, "tokens")
        return JSONResponse({"prompt": text})
