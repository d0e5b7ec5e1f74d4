"""Log-probability, entropy and Phi of the sampled tokens under the learner's weights; ``[T, V]`` never lives whole.

The transformer body runs once on a micro-batch; only positions that predict a sampled token go through the head, a
chunk at a time, in float32, and each chunk is recomputed in backward instead of kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_rl.pack import MicroBatch, attention_mask
from stare import TokenStatistics, entropy_of_logp, statistics_of_logp, token_statistics


class Policy(nn.Module):
    """A causal language model as the learner sees it: one forward a micro-batch, as ZeRO 3 needs it."""

    def __init__(self, model: Any, *, temperature: float, chunk_tokens: int = 1024) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(self, batch: MicroBatch, *, statistics: bool, entropy_gradient: bool = False) -> TokenStatistics:
        """Statistics [M] of the sampled tokens of ``batch``; ``logp`` carries gradient, Phi never does.

        With ``statistics=False`` entropy and Phi are left out (empty tensors). With ``entropy_gradient`` entropy is
        there either way, and carries gradient: one more [chunk, V] buffer, in forward and in backward.
        """
        hidden = self.model.get_decoder()(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None if batch.last is None else attention_mask(batch.last),
            use_cache=False,
        ).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, batch.predict)
        num_chunks = -(-batch.widest // self.chunk_tokens)
        parts: list[TokenStatistics] = []
        for rows, target in zip(hidden.tensor_split(num_chunks), batch.target.tensor_split(num_chunks), strict=True):
            if torch.is_grad_enabled():
                part = checkpoint(self._chunk, rows, target, statistics, entropy_gradient, use_reentrant=False)
            else:
                part = self._chunk(rows, target, statistics, entropy_gradient)
            parts.append(part)
        return TokenStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _chunk(self, hidden: Tensor, target: Tensor, statistics: bool, entropy_gradient: bool) -> TokenStatistics:
        logits = self.model.get_output_embeddings()(hidden).float() / self.temperature
        if statistics and not torch.is_grad_enabled():
            return token_statistics(logits, target)
        logp_V = torch.log_softmax(logits, dim=-1)
        logp = logp_V.gather(-1, target[:, None]).squeeze(-1)
        entropy = entropy_of_logp(logp_V) if entropy_gradient else logp.new_empty(0)
        if not statistics:
            return TokenStatistics(logp, entropy, logp.new_empty(0))
        with torch.no_grad():  # last: what backward recomputes stops before
            _, scored, phi = statistics_of_logp(logp_V, target)
        return TokenStatistics(logp, entropy if entropy_gradient else scored, phi)


@torch.no_grad()
def check_head(policy: Policy) -> None:
    """Raises ``ValueError`` when the model post-processes its logits (soft-capping, scaling) in a way we would skip."""
    vocabulary = policy.model.config.get_text_config().vocab_size
    input_ids = torch.arange(3, 11, device=next(policy.parameters()).device)[None] % vocabulary
    full = policy.model(input_ids=input_ids, use_cache=False).logits.float()
    hidden = policy.model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
    ours = policy.model.get_output_embeddings()(hidden).float()
    if not torch.allclose(full, ours, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(policy.model).__name__} changes its logits after the output embedding "
            f"(largest difference {(full - ours).abs().max().item():.3g}); such models are not supported"
        )
