"""The web search that a recipe names: an address with {query} in it, answered as SearXNG's JSON is.

    GET http://127.0.0.1:8888/search?q={query}&format=json  ->  {"results": [{"title", "url", "content"}, ...]}

It runs on the host: the sandbox has no network. What comes back is text for the model, and nothing is followed. Source
of the form: https://docs.searxng.org/dev/search_api.html
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from etude.agent.recipe import AgentRecipe
from etude.agent.tool import Found, ProviderError, Search

_RESULTS = 5
_PASSAGE_CHARS = 500
_MAX_BYTES = 4 << 20
_TIMEOUT_S = 20.0


class _Result(msgspec.Struct):
    url: str
    title: str = ""
    content: str | None = ""


class _Results(msgspec.Struct):
    results: list[_Result]


def search_of(recipe: AgentRecipe) -> Search | None:
    """What web_search asks; None where the recipe names no address."""
    if not recipe.search_url:
        return None

    async def search(query: str) -> Sequence[Found]:
        address = recipe.search_url.replace("{query}", quote(query, safe=""))
        return [
            Found(title=_line(one.title), url=_line(one.url), text=_line(one.content or ""))
            for one in (await _ask(address))[:_RESULTS]
        ]

    return search


async def _ask(address: str) -> list[_Result]:
    """Errors: ProviderError, without the address: a key may be in it."""
    import httpx2  # a fifth of a second, for those who search

    data = bytearray()
    try:
        async with (
            httpx2.AsyncClient(timeout=_TIMEOUT_S) as client,
            client.stream("GET", address, headers={"Accept": "application/json"}) as response,
        ):
            if response.status_code != 200:
                raise ProviderError(f"the search answered {response.status_code}")
            async for part in response.aiter_bytes():
                data += part
                if len(data) > _MAX_BYTES:
                    raise ProviderError("the search answered too much")
        return msgspec.json.decode(bytes(data), type=_Results).results
    except httpx2.TimeoutException:
        raise ProviderError("the search took too long") from None
    except (httpx2.HTTPError, httpx2.InvalidURL):
        raise ProviderError("the search cannot be reached") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ProviderError("the search answered with something else than results") from None


def _line(text: str) -> str:
    """On one line, and not too long."""
    return " ".join(text.split())[:_PASSAGE_CHARS]
