"""Gallery: images of what is held, made when they are asked for, and let go when others are. Shell.

An image takes some hundred octets for each Object, its payloads as much as they are. Both stay
within the memory that is given, a quarter of it for images.
"""

import asyncio
import gc
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager

from kvcs.depot.images import Image, ShelvedTrack
from kvcs.depot.loading import Loader, Read
from kvcs.depot.records import Entry, TrackNote
from kvcs.depot.shelf import Holding
from kvcs.profile.naming import PublicationName
from moqt.session.localobjects import DeferredObject

#: Images in memory at most, and the part of the memory that they may take.
MAX_IMAGES = 256
_IMAGES_SHARE = 4

#: Tracks of a publication, and their Objects, by Track Name.
Contents = tuple[Mapping[bytes, TrackNote], Mapping[bytes, list[Entry]]]


class Gallery:
    """Keeps images.

    Args:
        contents: Looks a publication up in the index, by its number.
        read: Reads payloads; called in threads.
        pool: The threads.
        memory_octets: Octets of memory for images and payloads.
        damaged: Called with the Track and the Object of a payload that was not as it was kept.
        failed: Called with what reading raised unexpectedly.

    Attributes:
        loader: Brings payloads.
    """

    def __init__(
        self,
        contents: Callable[[int], Awaitable[Contents]],
        read: Read,
        pool: Executor,
        memory_octets: int,
        *,
        damaged: Callable[[ShelvedTrack, DeferredObject], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.loader = Loader(
            read,
            pool,
            memory_octets * (_IMAGES_SHARE - 1) // _IMAGES_SHARE,
            damaged=damaged,
            failed=failed,
        )
        self._contents = contents
        self._pool = pool
        self._limit = memory_octets // _IMAGES_SHARE
        self._images: OrderedDict[PublicationName, tuple[Holding, Image]] = OrderedDict()
        self._making: dict[PublicationName, asyncio.Task[Image]] = {}
        self._pauses = 0
        self._collects = True

    @property
    def names(self) -> set[PublicationName]:
        """The publications of which there is an image."""
        return set(self._images)

    async def image(self, holding: Holding) -> Image:
        """Return what is served of a publication."""
        name = holding.name
        if name in self._images:
            self._images.move_to_end(name)
            return self._images[name][1]
        making = self._making.get(name)
        if making is None:
            making = self._making[name] = asyncio.ensure_future(self._make(holding))
            making.add_done_callback(lambda _: self._making.pop(name, None))
        # Whoever asks may give up; others may wait for the same.
        return await asyncio.shield(making)

    def outdated(self, name: PublicationName) -> None:
        """Make another image of a publication for whoever asks from now on."""
        self._images.pop(name, None)

    def forget(self, name: PublicationName) -> None:
        """Let go of an image, and of payloads that are in memory for it."""
        if name in self._images:
            _, image = self._images.pop(name)
            for track in image.tracks.values():
                self.loader.let_go(track)

    async def close(self) -> None:
        """Make no more images."""
        making = tuple(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    # -- parts -----------------------------------------------------------------------------------

    async def _make(self, holding: Holding) -> Image:
        seen = holding.objects, holding.finished
        with self._collections_paused():
            image = await self._made_of_index(holding)
        # What was kept or lost meanwhile is for the next one.
        if seen == (holding.objects, holding.finished):
            self._images[holding.name] = holding, image
            self._make_room()
        return image

    async def _made_of_index(self, holding: Holding) -> Image:
        notes, entries = await self._contents(holding.number)

        def make() -> Image:
            return Image(
                {
                    name: ShelvedTrack(holding, name, note, entries[name], self.loader.wanted)
                    for name, note in notes.items()
                }
            )

        return await asyncio.get_running_loop().run_in_executor(self._pool, make)

    @contextmanager
    def _collections_paused(self) -> Iterator[None]:
        """Have nothing look for cyclic garbage meanwhile.

        An image is many small objects at a time, and none of them garbage. Each look at all there
        is, of several, would hold the interpreter's lock, and with it the event loop, for longer
        than the image takes.
        """
        if not self._pauses:
            self._collects = gc.isenabled()
        self._pauses += 1
        gc.disable()
        try:
            yield
        finally:
            self._pauses -= 1
            if self._collects and not self._pauses:
                gc.enable()

    def _make_room(self) -> None:
        """Let go of the images that were used the longest ago, but not of those being read."""
        used = sum(image.octets for _, image in self._images.values())
        for name, (holding, image) in list(self._images.items())[:-1]:
            if used <= self._limit and len(self._images) <= MAX_IMAGES:
                return
            if not holding.readers:
                self.forget(name)
                used -= image.octets
