"""Run one target under a fuzzer that is guided by what is reached.

    python -m tests.fuzz.drive MODULE TARGET LIBFUZZER_ARGUMENT...

``scripts/fuzz`` runs it, in a process of its own: libFuzzer ends its process when it is done.
"""

import os
import sys


def main() -> None:
    import atheris

    # What is measured is our code; what it calls is only run.
    with atheris.instrument_imports(include=["moqt", "kvcs"]):
        from tests.fuzz.catalogue import targets_of

        target = targets_of(sys.argv[1])[sys.argv[2]]

    def one(data: bytes) -> None:
        target.outcome(data)

    # To merge inputs, libFuzzer starts itself again, by this name.
    program = os.environ.get("KVCS_FUZZ_PROGRAM", sys.argv[0])
    atheris.Setup([program, f"-max_len={target.max_octets}", *sys.argv[3:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
