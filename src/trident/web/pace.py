"""A body must arrive at a minimum pace, so that slow clients do not keep others from their places in the queue."""

import asyncio
from collections.abc import AsyncIterator

from trident.web.limits import RefusedError


async def at_pace(stream: AsyncIterator[bytes], grace: float, rate: float) -> AsyncIterator[bytes]:
    """Pass on a body of which at least `rate` bytes a second arrive, after `grace` seconds.

    Only the time that the server waits for the client counts.
    """
    clock = asyncio.get_running_loop().time
    waited, received = 0.0, 0
    while True:
        began = clock()
        try:
            async with asyncio.timeout(grace + received / rate - waited):
                data = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RefusedError(408, f"the pictures arrive at less than {rate / 1000:g} kB a second: too slow") from None
        waited += clock() - began
        received += len(data)
        yield data
