"""SGLang's processor of Kimi-K2.5, also for requests whose images slimx has prepared. Written for sglang 0.5.23, whose
own processor needs code from the checkpoint, and refuses token ids with a placeholder for each embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, override

from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor, MultimodalSpecialTokens


class KimiImages(BaseMultimodalProcessor):
    """Processor that takes token ids with prepared images, or text with images for transformers' processor, as SGLang
    sends when it warms up."""

    models = (KimiK25ForConditionalGeneration,)

    def __init__(self, hf_config: Any, server_args: Any, processor: Any, *args: Any, **kwargs: Any):
        super().__init__(hf_config, server_args, processor, *args, **kwargs)
        self._tokens = MultimodalSpecialTokens(image_token_id=hf_config.media_placeholder_token_id).build(processor)

    @override
    async def process_mm_data_async(
        self, image_data: Sequence[Any], input_text: str | list[int], request_obj: Any, *args: Any, **kwargs: Any
    ) -> MultimodalProcessorOutput:
        """Returns SGLang's form of the images `image_data` of a request. `input_text`: text with a placeholder for each
        image, or token ids; with prepared images, a placeholder for each embedding."""
        data = {"image_data": image_data, "multimodal_tokens": self._tokens}
        if isinstance(input_text, list) and self._all_mm_data_is_preprocessed(image_data):
            loaded = await self.fast_load_mm_data(prompt=input_text, input_ids=input_text, **data)
        else:
            loaded = await self.load_mm_data(prompt=input_text, **data)
        items, ids, _ = await self.process_and_combine_mm_data_async(loaded, self._tokens)
        return MultimodalProcessorOutput(
            input_ids=ids.tolist(), mm_items=items, im_token_id=self._tokens.image_token_id
        )
