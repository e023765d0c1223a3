# edge-opt with ONNX Runtime on a CPU. PIP_OPTIONS may name the index of a smaller build of torch.
FROM python:3.11-slim
ARG PIP_OPTIONS=""
WORKDIR /edge-opt
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir ${PIP_OPTIONS} '.[onnx]' && useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["edge-opt"]
CMD ["--help"]
