"""Chat templates: the checkpoint's own Jinja text, rendered in a sandbox."""

from flare_ray.frontend.templates.render import ChatTemplate, load_chat_template

__all__ = ["ChatTemplate", "load_chat_template"]
