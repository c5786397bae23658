"""vLLM's tiers with a worker that copies on a CPU, for tests: vLLM's own worker needs a GPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """`kv_connector_extra_config`: spec_name "CpuTieringSpec", spec_module_path this module."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class CpuCopyWorker(OffloadingWorker):
    """Copies blocks between the KV cache and the region of chunks, at once."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._groups = kv_caches.group_data_refs
        self._per_chunk = blocks_per_chunk
        self._finished: list[TransferResult] = []
        self._blocks = []
        self._chunks = []
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            self._blocks.append(cache.tensor.view(torch.int8).view(-1, page))
            self._chunks.append(region.create_next_worker_view(page * blocks_per_chunk))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy(job_id, src_spec, dst_spec.chunk_ids, store=True)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        self._copy(job_id, dst_spec, src_spec.chunk_ids, store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is complete when its submit returns."""

    def shutdown(self) -> None:
        self._blocks.clear()
        self._chunks.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, spec: GPULoadStoreSpec, chunks: Any, *, store: bool) -> None:
        blocks = [int(block) for block in spec.block_ids]
        chunks = [int(chunk) for chunk in chunks]
        first_block = first_chunk = copied = 0
        for refs, size, index in zip(self._groups, spec.group_sizes, spec.block_indices):
            skipped = index % self._per_chunk
            for place in range(size):
                chunk, within = divmod(skipped + place, self._per_chunk)
                for ref in refs:
                    page = ref.page_size_bytes
                    block = self._blocks[ref.tensor_idx][blocks[first_block + place]]
                    slot = self._chunks[ref.tensor_idx][chunks[first_chunk + chunk]]
                    slot = slot[within * page : (within + 1) * page]
                    (slot if store else block)[:page].copy_((block if store else slot)[:page])
                    copied += page
            first_block += size
            first_chunk += -(-(skipped + size) // self._per_chunk) if size else 0
        self._finished.append(TransferResult(job_id, True, copied, 0.0))
