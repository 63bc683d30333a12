//! Zigzag order: which ops are told of it, and what is refused.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

use ir::op::{Binary, Init, InputKind, SequenceOrder};
use ir::zigzag::{ZigzagError, zigzag};
use ir::{
    DType, Dim, Graph, LayerId, OpKind, Pass, Place, ReduceKind, Region, Shape, TensorType, ValueId,
};

struct Model {
    graph: Graph,
    layer: LayerId,
}

impl Model {
    fn op(&mut self, path: &str, kind: OpKind, inputs: &[ValueId]) -> ValueId {
        let place = Place::forward(path, self.layer);
        self.graph.add1(kind, inputs, place).unwrap()
    }
    fn param(&mut self, path: &str, lens: &[u64]) -> ValueId {
        let kind = OpKind::State {
            init: Init::Ones,
            decay: false,
        };
        let place = Place {
            path: path.into(),
            pass: Pass::Update,
            region: Region::StepBegin,
            layer: Some(self.layer),
        };
        let ty = TensorType::new(DType::F32, Shape::fixed(lens));
        self.graph.add_source(kind, ty, place).unwrap()
    }
    fn dropout(&mut self, path: &str, x: ValueId) -> ValueId {
        let kind = OpKind::Dropout {
            p: 0.1,
            key: path.into(),
            order: SequenceOrder::Natural,
        };
        self.op(path, kind, &[x])
    }
}

/// Embeddings `[B, 8, 4]`, on which `rest` builds, and the sum of what it makes.
fn model(rest: impl Fn(&mut Model, ValueId) -> ValueId) -> Graph {
    let mut graph = Graph::new("tiny");
    let layer = graph.add_layer("only");
    let mut m = Model { graph, layer };
    let kind = OpKind::Input {
        kind: InputKind::Tokens,
    };
    let ty = TensorType::new(DType::I32, Shape::batched(&[8]));
    let place = Place::forward("tokens", layer);
    let tokens = m.graph.add_source(kind, ty, place).unwrap();
    let table = m.param("table", &[10, 4]);
    let x = m.op("lookup", OpKind::Embedding, &[table, tokens]);
    let y = rest(&mut m, x);
    let dims = (0..m.graph.ty(y).shape.rank()).collect();
    let kind = ReduceKind::Sum;
    let sum = m.op("sum", OpKind::Reduce { kind, dims }, &[y]);
    m.graph.outputs = vec![sum];
    m.graph
}

#[test]
fn dropout_is_told_of_the_order() {
    let graph = model(|m, x| m.dropout("drop", x));
    let stored = zigzag(&graph, 2).unwrap();
    let drop = stored.op(stored.find("drop").unwrap());
    assert!(matches!(
        drop.kind,
        OpKind::Dropout {
            order: SequenceOrder::Zigzag { ranks: 2 },
            ..
        }
    ));
    assert_eq!(ir::text::parse(&ir::text::print(&stored)).unwrap(), stored);
    // The chunks of sequences of eight are equal for no other number of ranks.
    assert!(matches!(zigzag(&graph, 3), Err(ZigzagError::Chunks { .. })));
}

/// Where the sequence stands elsewhere there is no zigzag order, so no mask can be wrong.
#[test]
fn a_sequence_that_moves_is_refused() {
    let graph = model(|m, x| {
        let perm = vec![0, 2, 1];
        let y = m.op("turn", OpKind::Transpose { perm }, &[x]);
        m.dropout("drop", y)
    });
    let refused = zigzag(&graph, 2);
    assert!(matches!(refused, Err(ZigzagError::Mixes { path, .. }) if path == "turn"));
}

/// A table of positions is reordered where it is added; one that was repeated for every sample
/// before would be added to other positions.
#[test]
fn a_table_of_positions_for_every_sample_is_refused() {
    let add = OpKind::Binary { f: Binary::Add };
    let added = model(|m, x| {
        let table = m.param("positions", &[8, 4]);
        m.op("add", add.clone(), &[x, table])
    });
    assert!(zigzag(&added, 2).is_ok());
    let repeated = |leading: Vec<Dim>, lens: &'static [u64]| {
        model(|m, x| {
            let table = m.param("positions", lens);
            let leading = leading.clone();
            let table = m.op("each", OpKind::Broadcast { leading }, &[table]);
            m.op("add", add.clone(), &[x, table])
        })
    };
    let of_positions = repeated(vec![Dim::Batch], &[8, 4]);
    let refused = zigzag(&of_positions, 2);
    assert!(matches!(refused, Err(ZigzagError::Mixes { path, .. }) if path == "each"));
    // The same for all positions.
    let of_none = repeated(vec![Dim::Batch, Dim::Fixed(8)], &[4]);
    assert!(zigzag(&of_none, 2).is_ok());
}
