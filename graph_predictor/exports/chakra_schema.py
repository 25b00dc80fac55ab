"""Messages of MLCommons Chakra's execution traces, as far as foretrace writes them.

Names and numbers of fields are those of ``schema/protobuf/et_def.proto`` of mlcommons/chakra (read 2026-11). Chakra has
no package in an index, and its generated code would bind the version of protobuf, so that the messages are described
here to protobuf's own runtime; fields that are left out are not needed to read what is written.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Any

from tracer.errors import ForetraceError

VERSION = "0.0.4"
"""Of the schema, as Chakra's own converters write it."""


class ChakraNodeType(IntEnum):
    """``NodeType`` of the schema."""

    INVALID = 0
    METADATA = 1
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


COLLECTIVES = {"all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5,
               "all_to_all": 6, "reduce_scatter": 7, "barrier": 9}
"""``CollectiveCommType`` of the schema by foretrace's names."""

_DOUBLE, _UINT64, _INT32, _BOOL, _STRING, _MESSAGE, _ENUM, _INT64 = 1, 4, 5, 8, 9, 11, 14, 3
_ATTRIBUTES = (("double_val", 3, _DOUBLE), ("int32_val", 7, _INT32), ("int64_val", 9, _INT64),
               ("uint64_val", 13, _UINT64), ("bool_val", 27, _BOOL), ("string_val", 29, _STRING))
_TYPES = (("INVALID_NODE", 0), ("METADATA_NODE", 1), ("MEM_LOAD_NODE", 2), ("MEM_STORE_NODE", 3), ("COMP_NODE", 4),
          ("COMM_SEND_NODE", 5), ("COMM_RECV_NODE", 6), ("COMM_COLL_NODE", 7))
_PACKAGE = "ChakraProtoMsg"


@lru_cache(maxsize=1)
def messages() -> dict[str, Any]:
    """Return the classes ``GlobalMetadata``, ``Node`` and ``AttributeProto``, by name.

    Raises:
        ForetraceError: protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ForetraceError("Chakra traces are written with protobuf, which is not installed; pip install "
                             "'foretrace[export]'.") from error
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    kinds = file.enum_type.add(name="NodeType")
    for name, number in _TYPES:
        kinds.value.add(name=name, number=number)

    def message(name: str, *fields: tuple[str, int, int, bool, str]) -> Any:
        found = file.message_type.add(name=name)
        for field, number, kind, repeated, of in fields:
            found.field.add(name=field, number=number, type=kind, label=3 if repeated else 1,
                            type_name=f".{_PACKAGE}.{of}" if of else None)
        return found

    attribute = message("AttributeProto", ("name", 1, _STRING, False, ""), ("doc_string", 2, _STRING, False, ""))
    attribute.oneof_decl.add(name="value")
    for field, number, kind in _ATTRIBUTES:
        attribute.field.add(name=field, number=number, type=kind, label=1, oneof_index=0)
    attributes = ("attr", _MESSAGE, True, "AttributeProto")
    message("GlobalMetadata", ("version", 1, _STRING, False, ""), (attributes[0], 2, *attributes[1:]))
    message("IOInfo", *((name, number, _STRING, False, "") for number, name in enumerate(
        ("values", "shapes", "types"), 1)))
    message("Node", ("id", 1, _UINT64, False, ""), ("name", 2, _STRING, False, ""),
            ("type", 3, _ENUM, False, "NodeType"), ("ctrl_deps", 4, _UINT64, True, ""),
            ("data_deps", 5, _UINT64, True, ""), ("start_time_micros", 6, _UINT64, False, ""),
            ("duration_micros", 7, _UINT64, False, ""), ("inputs", 8, _MESSAGE, False, "IOInfo"),
            ("outputs", 9, _MESSAGE, False, "IOInfo"), (attributes[0], 10, *attributes[1:]))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
            for name in ("GlobalMetadata", "Node", "AttributeProto")}
