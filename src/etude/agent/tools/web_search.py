"""Searching the web, where the recipe names a backend."""

from __future__ import annotations

from etude.agent.tool import ProviderError, Tool


class WebSearch(Tool):
    """Search the web; shows title, address and a passage of each result."""

    name = "web_search"
    only_reads = True

    async def run(self, query: str) -> str:
        if self.desk.search is None:
            raise ProviderError("no search backend is set")
        found = await self.desk.search(query)
        return "\n".join(f"{one.title}\n{one.url}\n{one.text}\n" for one in found) or "nothing was found"
