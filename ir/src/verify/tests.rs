#![allow(clippy::unwrap_used)]

use super::*;
use crate::testing::{GraphOptions, random_graph};
use crate::{DType, Dim, LayerId, Place, Shape, TensorType};

/// The rules that a general random graph breaks after `change`.
fn broken(change: impl FnOnce(&mut Vec<Op>, &mut Vec<Value>)) -> Vec<(String, Rule)> {
    let options = GraphOptions {
        dropout: true,
        ..GraphOptions::default()
    };
    let graph = random_graph(3, &options);
    let (mut ops, mut values) = (graph.ops().to_vec(), graph.values().to_vec());
    change(&mut ops, &mut values);
    let parts = Parts {
        name: &graph.name,
        ops: &ops,
        values: &values,
        layers: &graph.layers,
        outputs: &graph.outputs,
    };
    check(&parts)
        .into_iter()
        .map(|v| (v.path, v.rule))
        .collect()
}

fn position(ops: &[Op], name: &str) -> usize {
    ops.iter()
        .position(|op| op.kind.name() == name)
        .expect("the graph has such an op")
}

#[test]
fn sound_graph_breaks_nothing() {
    assert_eq!(broken(|_, _| {}), vec![]);
}

#[test]
fn operand_from_later_op() {
    let found = broken(|ops, values| {
        let i = position(ops, "log_sum_exp");
        ops[i].inputs[0] = ValueId::new(values.len() - 1);
    });
    assert!(
        found
            .iter()
            .any(|(path, rule)| path.contains("log_sum_exp") && *rule == Rule::Operands),
        "{found:?}"
    );
}

#[test]
fn operand_that_does_not_exist() {
    let found = broken(|ops, _| ops.last_mut().unwrap().inputs[0] = ValueId(u32::MAX));
    assert!(
        found.iter().any(|(_, rule)| *rule == Rule::Operands),
        "{found:?}"
    );
}

#[test]
fn producer_that_is_another_op() {
    let found = broken(|_, values| values[1].producer = OpId(0));
    assert!(
        found.iter().any(|(_, rule)| *rule == Rule::Operands),
        "{found:?}"
    );
}

#[test]
fn result_type_that_is_not_inferred() {
    let found = broken(|ops, values| {
        let v = ops.last().unwrap().outputs[0];
        values[v.index()].ty = TensorType::new(DType::Bf16, Shape::default());
    });
    assert_eq!(
        found.iter().map(|(_, rule)| *rule).collect::<Vec<_>>(),
        [Rule::Types]
    );
}

#[test]
fn paths_taken_or_malformed() {
    let found = broken(|ops, _| ops[1].path = ops[0].path.clone());
    assert_eq!(
        found.iter().map(|(_, rule)| *rule).collect::<Vec<_>>(),
        [Rule::Path]
    );
    for path in ["", "a..b", ".a", "a.", "a b", "h.ü"] {
        let found = broken(|ops, _| ops[1].path = path.into());
        assert_eq!(found, [(path.to_string(), Rule::Path)]);
    }
}

#[test]
fn layers_unknown_or_out_of_order() {
    let found = broken(|ops, _| ops[1].layer = Some(LayerId(99)));
    assert_eq!(
        found.iter().map(|(_, rule)| *rule).collect::<Vec<_>>(),
        [Rule::Layer]
    );
    let found = broken(|ops, _| ops.last_mut().unwrap().layer = Some(LayerId(0)));
    assert_eq!(
        found.iter().map(|(_, rule)| *rule).collect::<Vec<_>>(),
        [Rule::Layer]
    );
}

#[test]
fn forward_op_without_layer() {
    let found = broken(|ops, _| ops.last_mut().unwrap().layer = None);
    assert_eq!(
        found.iter().map(|(_, rule)| *rule).collect::<Vec<_>>(),
        [Rule::World]
    );
}

#[test]
fn regions() {
    // A parameter that is read per microbatch.
    let found = broken(|ops, _| {
        let i = position(ops, "state");
        ops[i].region = Region::Microbatch;
    });
    assert_eq!(
        found.iter().map(|(_, rule)| *rule).collect::<Vec<_>>(),
        [Rule::Region]
    );
    // The loss at the end of the step, read from a microbatch without an accumulator.
    let found = broken(|ops, _| ops.last_mut().unwrap().region = Region::StepEnd);
    assert_eq!(
        found.iter().map(|(_, rule)| *rule).collect::<Vec<_>>(),
        [Rule::Region]
    );
    // An accumulator carries a value into `StepEnd`, and to nothing in the loop.
    for (region, expected) in [
        (Region::StepEnd, 0),
        (Region::Microbatch, 1),
        (Region::StepBegin, 1),
    ] {
        let mut graph = random_graph(3, &GraphOptions::default());
        let place = |path: &str, region| Place {
            path: path.into(),
            pass: Pass::Update,
            region,
            layer: None,
        };
        let sum = graph.add1(
            OpKind::Accumulate { dtype: DType::F32 },
            &[graph.outputs[0]],
            place("sum", Region::Microbatch),
        );
        graph
            .add1(OpKind::Layout, &[sum.unwrap()], place("total", region))
            .unwrap();
        let found = verify(&graph);
        assert_eq!(found.len(), expected, "{found:?}");
        assert!(
            found
                .iter()
                .all(|v| v.rule == Rule::Region && v.path == "total"),
            "{found:?}"
        );
    }
}

#[test]
fn log_sum_exp_of_other_logits() {
    let mut graph = Graph::new("g");
    let layer = graph.add_layer("l");
    let at = |path: &str| Place::forward(path, layer);
    let labels = TensorType::new(DType::I32, Shape::batched(&[2]));
    let labels = graph
        .add_source(
            OpKind::Input {
                kind: crate::op::InputKind::Labels,
            },
            labels,
            at("labels"),
        )
        .unwrap();
    let ty = TensorType::new(DType::F32, Shape::fixed(&[2, 3]));
    let state = OpKind::State {
        init: crate::op::Init::Ones,
        decay: true,
    };
    let place = Place {
        path: "table".into(),
        pass: Pass::Update,
        region: Region::StepBegin,
        layer: Some(layer),
    };
    let table = graph.add_source(state, ty, place).unwrap();
    let logits = graph
        .add1(
            OpKind::Broadcast {
                leading: vec![Dim::Batch],
            },
            &[table],
            at("logits"),
        )
        .unwrap();
    let moved = graph.add1(OpKind::Layout, &[logits], at("moved")).unwrap();
    let other = graph
        .add1(
            OpKind::Unary {
                f: crate::op::Unary::Neg,
            },
            &[logits],
            at("other"),
        )
        .unwrap();
    let lse = graph.add1(OpKind::LogSumExp, &[moved], at("lse")).unwrap();
    graph
        .add1(OpKind::CrossEntropy, &[logits, lse, labels], at("good"))
        .unwrap();
    graph
        .add1(OpKind::CrossEntropy, &[other, lse, labels], at("bad"))
        .unwrap();
    let found = verify(&graph);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(
        (found[0].path.as_str(), found[0].rule),
        ("bad", Rule::LogSumExp)
    );
    assert_eq!(
        found[0].to_string(),
        format!("bad: log_sum_exp: expected the log-sum-exp of {other}, found `lse`")
    );
}

#[test]
fn dropout_keys() {
    let mut graph = random_graph(3, &GraphOptions::default());
    let layer = LayerId::new(graph.layers.len() - 1);
    let has_samples = |v: &ValueId| {
        let ty = graph.ty(*v);
        ty.dtype.is_float() && ty.shape.0.first() == Some(&Dim::Batch)
    };
    let mut results = graph.ops().iter().flat_map(|op| op.outputs.clone());
    let x = results.find(has_samples).unwrap();
    let drop = |key: &str| OpKind::Dropout {
        p: 0.5,
        key: key.into(),
        order: Default::default(),
    };
    let at = |path: &str, pass| Place {
        path: path.into(),
        pass,
        region: Region::Microbatch,
        layer: Some(layer),
    };
    graph.add1(drop("a"), &[x], at("a", Pass::F)).unwrap();
    graph.add1(drop("a"), &[x], at("b", Pass::F)).unwrap();
    graph.add1(drop("a"), &[x], at("grad.a", Pass::BI)).unwrap();
    graph.add1(drop("c"), &[x], at("grad.c", Pass::BI)).unwrap();
    let found: Vec<_> = verify(&graph)
        .into_iter()
        .map(|v| (v.path, v.rule))
        .collect();
    assert_eq!(
        found,
        [
            ("b".to_string(), Rule::DropoutKey),
            ("grad.c".to_string(), Rule::DropoutKey)
        ]
    );
}

#[test]
fn attributes_that_are_not_finite() {
    let mut graph = random_graph(3, &GraphOptions::default());
    let layer = LayerId::new(graph.layers.len() - 1);
    let ty = TensorType::new(DType::F32, Shape::default());
    let kind = OpKind::State {
        init: crate::op::Init::Normal { std: f64::NAN },
        decay: false,
    };
    let place = Place {
        path: "s".into(),
        pass: Pass::Update,
        region: Region::StepBegin,
        layer: Some(layer),
    };
    graph.add_source(kind, ty, place).unwrap();
    let found: Vec<_> = verify(&graph)
        .into_iter()
        .map(|v| (v.path, v.rule))
        .collect();
    assert_eq!(found, [("s".to_string(), Rule::Finite)]);
}

#[test]
fn batch_dims_not_first_or_several() {
    let mut graph = random_graph(3, &GraphOptions::default());
    let layer = LayerId::new(graph.layers.len() - 1);
    let at = |path: &str, pass| Place {
        path: path.into(),
        pass,
        region: Region::Microbatch,
        layer: Some(layer),
    };
    // Second, as behind experts, and third.
    let behind = |dims: &[u64]| OpKind::Broadcast {
        leading: dims.iter().map(|&n| Dim::Fixed(n)).collect(),
    };
    let tokens = ValueId(0);
    let mut add = |dims: &[u64], path, pass| {
        let made = graph.add1(behind(dims), &[tokens], at(path, pass));
        made.unwrap();
    };
    add(&[2], "experts", Pass::F);
    add(&[2, 2], "t", Pass::F);
    add(&[2, 2], "grad.t", Pass::BI);
    // A table that is not a parameter: rows as long as the batch.
    let table = TensorType::new(DType::F32, Shape(vec![Dim::Fixed(3)]));
    let kind = OpKind::State {
        init: crate::op::Init::Ones,
        decay: false,
    };
    let place = Place {
        region: Region::StepBegin,
        ..at("w", Pass::Update)
    };
    let w = graph.add_source(kind, table, place).unwrap();
    let x = graph
        .add1(
            OpKind::Broadcast {
                leading: vec![Dim::Batch],
            },
            &[w],
            at("grad.x", Pass::BI),
        )
        .unwrap();
    let x = graph
        .add1(
            OpKind::Transpose { perm: vec![1, 0] },
            &[x],
            at("grad.xt", Pass::BI),
        )
        .unwrap();
    graph
        .add1(OpKind::Embedding, &[x, tokens], at("grad.two", Pass::BI))
        .unwrap();
    let found: Vec<_> = verify(&graph)
        .into_iter()
        .map(|v| (v.path, v.rule))
        .collect();
    assert_eq!(
        found,
        [
            ("t".to_string(), Rule::Batch),
            ("grad.two".to_string(), Rule::Batch)
        ]
    );
}

#[test]
fn output_that_does_not_exist() {
    let mut graph = random_graph(3, &GraphOptions::default());
    graph.outputs.push(ValueId::new(graph.values().len()));
    let found: Vec<_> = verify(&graph)
        .into_iter()
        .map(|v| (v.path, v.rule))
        .collect();
    assert_eq!(found, [("random-3".to_string(), Rule::Output)]);
}

#[test]
fn dead_ops_are_listed() {
    let mut graph = random_graph(3, &GraphOptions::default());
    assert_eq!(dead_ops(&graph), []);
    let loss = graph.outputs[0];
    let layer = LayerId::new(graph.layers.len() - 1);
    let a = graph
        .add1(OpKind::Layout, &[loss], Place::forward("a", layer))
        .unwrap();
    graph
        .add1(OpKind::Layout, &[a], Place::forward("b", layer))
        .unwrap();
    let paths: Vec<_> = dead_ops(&graph)
        .into_iter()
        .map(|id| graph.op(id).path.clone())
        .collect();
    assert_eq!(paths, ["a", "b"]);
    assert_eq!(verify(&graph), []);
}
