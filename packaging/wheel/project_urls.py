"""The addresses in the wheel's metadata: of the repository whose workflow builds it.

A fork's wheels name the fork. A wheel that is built elsewhere has no addresses, because a checkout does not know where
it is published.
"""

import os


def project_urls(environment):
    """Return the labels and addresses of the repository that GitHub's workflows name in their environment."""
    server = environment.get("GITHUB_SERVER_URL", "").rstrip("/")
    repository = environment.get("GITHUB_REPOSITORY", "").strip("/")
    if not server or not repository:
        return {}
    home = f"{server}/{repository}"
    source = f"{home}/blob/{environment.get('GITHUB_SHA') or 'HEAD'}"
    return {
        "Homepage": home,
        "Documentation": f"{source}/docs/index.md",
        "Changelog": f"{source}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def dynamic_metadata(field, settings):
    """Give scikit-build-core the field `urls`."""
    if field != "urls" or settings:
        raise RuntimeError(f"project_urls gives the field 'urls' and has no settings; it was asked for {field!r} with {settings!r}")
    return project_urls(os.environ)
