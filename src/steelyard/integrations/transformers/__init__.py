"""Balanced core attention for Hugging Face Transformers 5.x, in three lines.

    import steelyard.integrations.transformers as st

    attached = st.attach(model)
    loss = model(**st.collate(docs), num_items_in_batch=labels_of_all_ranks).loss

`attach` registers our attention and its mask function with Transformers' public interfaces and refuses models that it
cannot compute exactly; nothing of Transformers is patched. Tokens, labels, positions and rotary embeddings stay where
the data loader put them.
"""

from steelyard.integrations.transformers.attach import Attachment, attach
from steelyard.integrations.transformers.batch_plan import BatchPlan
from steelyard.integrations.transformers.callback import BalanceCallback
from steelyard.integrations.transformers.collate import collate, label_count
from steelyard.integrations.transformers.ping_pong import PingPong

__all__ = ["Attachment", "BalanceCallback", "BatchPlan", "PingPong", "attach", "collate", "label_count"]
