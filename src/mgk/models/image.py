"""Classification of images, as sequences of pixels or of patches."""

from torch import Tensor
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils import can_return_tuple

from mgk.models.classification import MgkClassifier, pool
from mgk.models.configuration import MgkConfig
from mgk.models.losses import classification_loss
from mgk.models.modeling import MgkModel, MgkPreTrainedModel


class MgkForImageClassification(MgkPreTrainedModel):
    """Classify an image: ``input_ids`` of pixel values 0 to 255 as in LRA, or with ``patch_size`` patches as in ViT."""

    def __init__(self, config: MgkConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MgkModel(config)
        self.main_input_name = self.model.main_input_name
        self.classifier = MgkClassifier(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> ImageClassifierOutput:
        """Logits (B, num_labels), and the loss where there are labels.

        Args:
            input_ids: int64 (B, pixels) where ``patch_size`` is None.
            pixel_values: (B, num_channels, image_size, image_size) where it is set.
            attention_mask: (B, pixels) or (B, patches), 1 for what takes part.
            labels: (B,).
            output_attentions: Whether to return the weights of every layer.
            output_hidden_states: Whether to return every layer's output.
            num_items_in_batch: The targets of the whole optimizer step, for gradient accumulation; ``Trainer`` tells.
        """
        encoded = self.model(
            input_ids,
            attention_mask,
            pixel_values=pixel_values,
            use_cache=False,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.classifier(pool(encoded.last_hidden_state, attention_mask, self.config.pooling))
        loss = None
        if labels is not None:
            loss = classification_loss(logits, labels, self.config.problem_type, num_items_in_batch)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )
