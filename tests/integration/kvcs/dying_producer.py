"""A producer in a process of its own, which stops in the middle of a layer and waits to be killed.

Its arguments: certificate file, key file, whole layers, then Objects of the next layer in each
track. It prints its UDP port. The Object after those is half sent.
"""

import asyncio
import sys
from itertools import islice
from pathlib import Path

from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.scene import BLOCKS, fill, in_halves, on_stage


async def main(certificate: str, key: str, layers: int, objects: int) -> None:
    files = CertificateFiles(Path("unused"), Path(certificate), Path(key))
    async with on_stage(files) as scene:
        handle = scene.open()
        segment = await handle.add_segment(BLOCKS)
        await fill(handle, range(layers))
        # Three steps for each Object, in two tracks; and one more for the half.
        for _ in islice(in_halves(handle.publication, segment, layers), 3 * 2 * objects + 2):
            pass
        print(scene.spec.uri, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
