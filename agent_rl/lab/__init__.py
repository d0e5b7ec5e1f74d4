"""The lab: a tabular softmax policy with verifiable reward, on which a method shows what it does to entropy."""
