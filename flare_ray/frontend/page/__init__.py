"""The page at /ui/: a chat and the service's status in a browser, of plain files without a build.

What a browser runs stands in `index.html`, `page.css` and three modules: `service.js` (addresses,
key, errors, streams), `chat.js`, `status.js`. It asks this service's own public routes and nothing
else. `routes.py` sends the files.
"""

from flare_ray.frontend.page.routes import page_routes

__all__ = ["page_routes"]
