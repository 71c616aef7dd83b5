"""Run an emulator of Google Cloud Storage with the bucket `bucket`.

    python emulator.py PORT

`gcp-storage-emulator` lacks the generations of downloaded objects and preconditions on them, on
which TensorStore and locks depend: they are added here.
"""

import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import HTTPServer
from typing import Any

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.storage import Storage


class Changed(Exception):
    """The object does not have the generation that a request requires."""


required: dict[str, str] = {}
"""Query of the current request; the server handles one at a time."""


def generation(storage: Storage, bucket: str, name: str) -> str:
    try:
        return storage.get_file_obj(bucket, name)["generation"]
    except NotFound:
        return "0"


class Checking(Storage):
    def create_file(self, bucket_name: str, file_name: str, *rest: Any, **options: Any) -> None:
        wanted = required.get("ifGenerationMatch")
        if wanted is not None and wanted != generation(self, bucket_name, file_name):
            raise Changed
        super().create_file(bucket_name, file_name, *rest, **options)


def writing(handler: Callable[..., None]) -> Callable[..., None]:
    def handle(request: Any, response: Any, storage: Storage) -> None:
        required.update({name: values[0] for name, values in request.query.items()})
        try:
            handler(request, response, storage)
        except Changed:
            response.status = HTTPStatus.PRECONDITION_FAILED
        finally:
            required.clear()

    return handle


def reading(handler: Callable[..., None]) -> Callable[..., None]:
    def handle(request: Any, response: Any, storage: Storage) -> None:
        name = request.params["bucket_name"], request.params["object_id"]
        response["x-goog-generation"] = found = generation(storage, *name)
        if request.query.get("ifGenerationNotMatch") == [found]:
            response.status = HTTPStatus.NOT_MODIFIED
        elif request.query.get("ifGenerationMatch", [found]) != [found]:
            response.status = HTTPStatus.PRECONDITION_FAILED
        else:
            handler(request, response, storage)

    return handle


CHANGED = {
    objects.insert: writing,
    objects.upload_partial: writing,
    objects.get: reading,
    objects.download: reading,
}

if __name__ == "__main__":
    server.HANDLERS = tuple(
        (path, {method: CHANGED.get(x, lambda same: same)(x) for method, x in handlers.items()})
        for path, handlers in server.HANDLERS
    )
    server.Storage = Checking
    HTTPServer.request_queue_size = 128  # with 5, connections wait for a second
    server.Server("localhost", int(sys.argv[1]), in_memory=True, default_bucket="bucket").run()
