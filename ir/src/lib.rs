//! The language of Meshwright: what every other crate speaks.
//!
//! Graphs and ops, device and logical meshes, sharding specs, collectives and the one
//! definition of resharding, what is trained, cluster facts, plans, role programs,
//! measurements; and their text forms. No I/O, no clocks, no randomness, no search.

pub mod autodiff;
pub mod boundary;
pub mod chain;
pub mod cluster;
pub mod collective;
pub mod graph;
mod id;
pub mod likeness;
mod made_for;
pub mod measurement;
pub mod mesh;
pub mod offload;
pub mod op;
mod origin;
pub mod pattern;
pub mod plan;
pub mod program;
pub mod reshard;
pub mod schedule;
pub mod sharding;
pub mod storage;
pub mod tensor;
#[doc(hidden)]
pub mod testing;
pub mod text;
pub mod train_spec;
pub mod training;
pub mod units;
pub mod verify;
pub mod zigzag;

pub use collective::{Contract, Order, Reduction, Sum};
pub use graph::{Graph, GraphError, Op, Pass, Place, Region, Value};
pub use id::{
    AxisId, BufferId, FactorId, InstrId, LayerId, OpId, Rank, StageId, StreamId, TemplateId,
    TransferId, ValueId,
};
pub use mesh::{Axis, DeviceMesh, LogicalMesh};
pub use op::OpKind;
pub use origin::Origin;
pub use sharding::{Axes, DimSharding, Dims, LocalRange, ReduceKind, ShardingSpec};
pub use tensor::{DType, Dim, Shape, TensorType};
pub use train_spec::{Optimizer, Precision, Task, TrainFile, TrainSpec};
pub use units::{Bytes, BytesPerSecond, Figure, Flops, FlopsPerSecond, Seconds, counted};
