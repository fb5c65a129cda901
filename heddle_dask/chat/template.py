"""LEAD'S STOPGAP: overwrite me."""
class ChatTemplate:
    end_token_ids=(257,)
    vocab_size=320
    @classmethod
    def load(cls, d): return cls()
    def render(self, msgs): return [b for m in msgs for b in m["content"].encode()]
    def bridge(self, msgs, *, ended): return [b for m in msgs for b in m["content"].encode()]
    def decode(self, ids): return bytes(i for i in ids if i<256).decode("utf8","replace")
