# One small image: the command kvcs and what it needs, run by a user without rights.
#
#   docker build -t kvcs .
#   docker run --rm kvcs --help
#
# BASE may be any image that has Python 3.11 or later, with its venv module, and useradd.
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
LABEL kvcs.stage=build
WORKDIR /build
COPY . .
# A folder wheels/ that holds every package takes the place of the package index, for machines
# that cannot reach one from here.
RUN python3 -m venv /opt/kvcs \
    && if [ -d wheels ]; then set -- --no-index --find-links wheels; fi \
    && /opt/kvcs/bin/pip install --disable-pip-version-check --no-cache-dir "$@" . \
    && /opt/kvcs/bin/pip uninstall --yes setuptools pip \
    && find /opt/kvcs -name tests -type d -prune -exec rm -r {} +

FROM ${BASE}
COPY --from=build /opt/kvcs /opt/kvcs
# Written out, since not every base image says what its own is.
ENV PATH=/opt/kvcs/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# A volume that is mounted at /keys or /work for the first time gets their owner.
RUN useradd --system --uid 10001 --user-group --no-create-home kvcs \
    && install --directory --owner=kvcs --group=kvcs --mode=0750 /keys /work
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["kvcs"]
CMD ["--help"]
# A daemon that is told by KVCS_LISTEN where to listen is asked there whether it serves.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["kvcs", "ping", "--connect-timeout-s", "4"]
