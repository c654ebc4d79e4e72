"""The process of one end: ``python -m benchcases DESCRIPTOR``, the descriptor that of a pipe."""

import sys

from benchcases.ends import be_an_end

if __name__ == "__main__":
    be_an_end(int(sys.argv[1]))
