//! Typed indices. An id names an entry of one arena and is never mixed with another's.

/// Declares a `u32` newtype index with `new`, `index`, ordering and serde as a bare number.
macro_rules! typed_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The id of entry `index`. Arenas never exceed `u32::MAX` entries.
            pub fn new(index: usize) -> Self {
                Self(u32::try_from(index).expect("an arena holds fewer than 2^32 entries"))
            }
            /// The position in the arena.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

typed_id!(
    /// An SSA value of a graph.
    ValueId, "%"
);
typed_id!(
    /// An op of a graph.
    OpId, "op"
);
typed_id!(
    /// A layer of the forward graph: the unit that pipeline stages are made of.
    LayerId, "layer"
);
typed_id!(
    /// A pipeline stage.
    StageId, "stage"
);
typed_id!(
    /// A device of the cluster, numbered host-major over the whole cluster.
    Rank, "rank"
);
typed_id!(
    /// A stream of a role's ranks.
    StreamId, "stream"
);
typed_id!(
    /// An axis of a logical mesh; axis 0 is the outermost (slowest links).
    AxisId, "axis"
);
typed_id!(
    /// A factor of an op's sharding rule.
    FactorId, "f"
);
typed_id!(
    /// A buffer of a role program.
    BufferId, "buf"
);
typed_id!(
    /// An instruction of one template of a role program.
    InstrId, "i"
);
typed_id!(
    /// A template (straight-line list of instructions) of a role program.
    TemplateId, "t"
);
typed_id!(
    /// A stage-to-stage transfer of a program.
    TransferId, "x"
);
