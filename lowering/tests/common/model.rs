//! A residual MLP language model with lengths that tell factors apart: sequence 4,
//! hidden 6, inner 16, vocabulary 10.

use ir::op::{Binary, Einsum, Init, InputKind, Unary};
use ir::{
    DType, Graph, LayerId, OpKind, Pass, Place, ReduceKind, Region, Shape, TensorType, ValueId,
};

pub const SEQUENCE: u64 = 4;
pub const HIDDEN: u64 = 6;
pub const INNER: u64 = 16;
pub const VOCAB: u64 = 10;

/// Layers `embed`, `h.0` .. `h.{n-1}`, `head`; a tied head uses the embedding table.
pub fn mlp(n_blocks: usize, tied: bool) -> Graph {
    let mut g = Graph::new("mlp");
    let embed = g.add_layer("embed");
    let table = param(&mut g, embed, "embed.table", &[VOCAB, HIDDEN]);
    let tokens = input(&mut g, embed, "tokens", InputKind::Tokens);
    let mut x = add(
        &mut g,
        embed,
        "embed.lookup",
        OpKind::Embedding,
        &[table, tokens],
    );
    for i in 0..n_blocks {
        let name = format!("h.{i}");
        let h = g.add_layer(&name);
        let up = param(&mut g, h, &format!("{name}.up"), &[HIDDEN, INNER]);
        let down = param(&mut g, h, &format!("{name}.down"), &[INNER, HIDDEN]);
        let y = add(
            &mut g,
            h,
            &format!("{name}.fc"),
            dot("bsh,hf->bsf"),
            &[x, up],
        );
        let y = add(
            &mut g,
            h,
            &format!("{name}.act"),
            OpKind::Unary { f: Unary::Relu },
            &[y],
        );
        let y = add(
            &mut g,
            h,
            &format!("{name}.proj"),
            dot("bsf,fh->bsh"),
            &[y, down],
        );
        x = add(
            &mut g,
            h,
            &format!("{name}.out"),
            OpKind::Binary { f: Binary::Add },
            &[y, x],
        );
    }
    let head = g.add_layer("head");
    let table = if tied {
        table
    } else {
        param(&mut g, head, "head.weight", &[VOCAB, HIDDEN])
    };
    let labels = input(&mut g, head, "labels", InputKind::Labels);
    let logits = add(&mut g, head, "head.logits", dot("bsh,vh->bsv"), &[x, table]);
    let lse = add(&mut g, head, "head.lse", OpKind::LogSumExp, &[logits]);
    let nll = add(
        &mut g,
        head,
        "head.nll",
        OpKind::CrossEntropy,
        &[logits, lse, labels],
    );
    let sum = OpKind::Reduce {
        kind: ReduceKind::Sum,
        dims: vec![0, 1],
    };
    let total = add(&mut g, head, "head.sum", sum, &[nll]);
    g.outputs = vec![total];
    g
}

fn dot(einsum: &str) -> OpKind {
    OpKind::DotGeneral {
        einsum: Einsum::parse(einsum).unwrap(),
    }
}

fn add(g: &mut Graph, layer: LayerId, path: &str, kind: OpKind, inputs: &[ValueId]) -> ValueId {
    g.add1(kind, inputs, Place::forward(path, layer)).unwrap()
}

fn param(g: &mut Graph, layer: LayerId, path: &str, lens: &[u64]) -> ValueId {
    let place = Place {
        path: path.into(),
        pass: Pass::Update,
        region: Region::StepBegin,
        layer: Some(layer),
    };
    let kind = OpKind::State {
        init: Init::Normal { std: 0.02 },
        decay: true,
    };
    g.add_source(kind, TensorType::new(DType::F32, Shape::fixed(lens)), place)
        .unwrap()
}

fn input(g: &mut Graph, layer: LayerId, path: &str, kind: InputKind) -> ValueId {
    let ty = TensorType::new(DType::I32, Shape::batched(&[SEQUENCE]));
    g.add_source(OpKind::Input { kind }, ty, Place::forward(path, layer))
        .unwrap()
}
