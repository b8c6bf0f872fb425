# The pinned environment as a container, for a laptop or any cloud that takes images; with a GPU the host needs only its
# driver and the NVIDIA container toolkit.
#
#   docker build -t gpt2 .                   # CPU only: --build-arg PIP_EXTRA_INDEX_URL=... with a CPU build of torch
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/data:/gpt2/data" -v "$PWD/log:/gpt2/log" gpt2 \
#       python train_gpt2.py gpt2-124m --dry-run
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /gpt2
ARG PIP_EXTRA_INDEX_URL
COPY Makefile requirements.txt ./
RUN PIP_NO_CACHE_DIR=1 make install
ENV PATH=/gpt2/.venv/bin:$PATH
COPY *.py *.ipynb train.sh ./
COPY bench/reference_fineweb_edu_10b.csv bench/
CMD ["bash"]
