//! Text form: exact round trips, equal layers once, errors that say where.
#![allow(clippy::unwrap_used)]

use ir::op::{Einsum, Init, InputKind, Unary};
use ir::testing::{GraphOptions, Rng, random_graph, sequence_of};
use ir::text::{ParseError, parse, print};
use ir::verify::{dead_ops, verify};
use ir::{
    DType, Dim, Graph, LayerId, OpId, OpKind, Origin, Pass, Place, Region, Shape, TensorType,
    TrainSpec, ValueId,
};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn options() -> impl Strategy<Value = GraphOptions> {
    (any::<[bool; 6]>(), 0usize..6, 1usize..4).prop_map(
        |(
            [
                integer_linear,
                dropout,
                reduce_max,
                experts,
                images,
                equal_layers,
            ],
            n_layers,
            blocks_per_layer,
        )| {
            GraphOptions {
                integer_linear,
                dropout,
                reduce_max,
                experts,
                images,
                state_spaces: images,
                n_layers,
                equal_layers,
                blocks_per_layer,
            }
        },
    )
}

fn round_trip(graph: &Graph) -> String {
    let text = print(graph);
    let back = parse(&text).unwrap_or_else(|e| panic!("{e} {:?}\n{text}", e.help));
    assert_eq!(&back, graph, "\n{text}");
    assert_eq!(print(&back), text);
    text
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_graphs_are_sound_and_round_trip(seed: u64, options in options()) {
        let graph = random_graph(seed, &options);
        prop_assert_eq!(verify(&graph), vec![]);
        prop_assert_eq!(dead_ops(&graph), vec![]);
        prop_assert_eq!(&random_graph(seed, &options), &graph);
        let loss = graph.ty(graph.outputs[0]);
        prop_assert_eq!(loss, &TensorType::new(DType::F32, Shape::default()));
        prop_assert_eq!(graph.layers.len(), options.n_layers + 2);
        let text = round_trip(&graph);
        if options.equal_layers && options.n_layers >= 2 {
            prop_assert_eq!(text.matches("repeat").count(), 1, "{}", text);
        }
    }

    /// Whatever happens to the text, parsing ends with a graph or a place in the text.
    #[test]
    fn damaged_text_gives_an_error_with_a_place(seed: u64, options in options(), edits in 1usize..6) {
        let mut rng = Rng::new(seed);
        let mut bytes = print(&random_graph(seed, &options)).into_bytes();
        for _ in 0..edits {
            let at = rng.below(bytes.len() as u64) as usize;
            match rng.below(4) {
                0 => { bytes.remove(at); }
                1 => bytes[at] = rng.next() as u8,
                2 => bytes.insert(at, rng.pick(b"%{}[]()<>\"\\,:@=0123456789 \nabB.-+")),
                _ => {
                    let end = (at + rng.below(40) as usize).min(bytes.len());
                    let piece = bytes[at..end].to_vec();
                    let to = rng.below(bytes.len() as u64) as usize;
                    bytes.splice(to..to, piece);
                }
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        match parse(&text) {
            Ok(graph) => { round_trip(&graph); }
            Err(e) => check_place(&text, &e),
        }
    }

    #[test]
    fn any_text_gives_an_error_with_a_place(text in "(graph|repeat|layers|[ -~\n]|%[0-9]|[{}\"é]){0,60}") {
        if let Err(e) = parse(&text) {
            check_place(&text, &e);
        }
    }
}

fn check_place(text: &str, e: &ParseError) {
    assert!(
        text.is_char_boundary(e.start) && text.is_char_boundary(e.start + e.len),
        "{e:?}"
    );
    let before = &text[..e.start];
    assert_eq!(e.line, before.split('\n').count());
    assert_eq!(
        e.column,
        before.rsplit('\n').next().unwrap().chars().count() + 1
    );
    assert!(!e.message.is_empty());
}

/// Returns the text that the error points at, and the error.
fn failure(text: &str) -> (String, String) {
    let e = parse(text).unwrap_err();
    check_place(text, &e);
    (text[e.start..e.start + e.len].to_string(), e.to_string())
}

fn state(graph: &mut Graph, path: String, shape: &[u64], layer: LayerId) -> ValueId {
    let kind = OpKind::State {
        init: Init::Normal { std: 0.02 },
        decay: true,
    };
    let place = Place {
        path,
        pass: Pass::Update,
        region: Region::StepBegin,
        layer: Some(layer),
    };
    graph
        .add_source(
            kind,
            TensorType::new(DType::F32, Shape::fixed(shape)),
            place,
        )
        .unwrap()
}

/// `n` layers `x = x + gelu(x W)` with all states first when `states_first`.
fn stack(n: usize, states_first: bool) -> Graph {
    let mut g = Graph::new("stack \"of\" layers\n");
    let embed = g.add_layer("embed");
    let ty = TensorType::new(DType::I32, Shape::batched(&[8]));
    let tokens = g
        .add_source(
            OpKind::Input {
                kind: InputKind::Tokens,
            },
            ty,
            Place::forward("tokens", embed),
        )
        .unwrap();
    let table = state(&mut g, "table".into(), &[50, 4], embed);
    let layers: Vec<LayerId> = (0..n).map(|i| g.add_layer(format!("h.{i}"))).collect();
    let path = |i: usize, what: &str| format!("model.h.{i}.{what}");
    let mut weights: Vec<ValueId> = Vec::new();
    if states_first {
        weights = layers
            .iter()
            .enumerate()
            .map(|(i, &l)| state(&mut g, path(i, "w"), &[4, 4], l))
            .collect();
    }
    let mut x = g
        .add1(
            OpKind::Embedding,
            &[table, tokens],
            Place::forward("rows", embed),
        )
        .unwrap();
    for (i, &l) in layers.iter().enumerate() {
        let w = if states_first {
            weights[i]
        } else {
            state(&mut g, path(i, "w"), &[4, 4], l)
        };
        let einsum = Einsum::parse("bsh,hf->bsf").unwrap();
        let y = g
            .add1(
                OpKind::DotGeneral { einsum },
                &[x, w],
                Place::forward(path(i, "dot"), l),
            )
            .unwrap();
        let y = g
            .add1(
                OpKind::Unary { f: Unary::GeluTanh },
                &[y],
                Place::forward(path(i, "gelu"), l),
            )
            .unwrap();
        let key = path(i, "drop");
        let y = g
            .add1(
                OpKind::Dropout {
                    p: 0.1,
                    key: key.clone(),
                    order: Default::default(),
                },
                &[y],
                Place::forward(key, l),
            )
            .unwrap();
        x = g
            .add1(
                OpKind::Binary {
                    f: ir::op::Binary::Add,
                },
                &[x, y],
                Place::forward(path(i, "add"), l),
            )
            .unwrap();
    }
    let head = g.add_layer("head");
    let tied = Einsum::parse("bsh,vh->bsv").unwrap();
    let logits = g
        .add1(
            OpKind::DotGeneral { einsum: tied },
            &[x, table],
            Place::forward("logits", head),
        )
        .unwrap();
    g.outputs = vec![logits];
    g
}

#[test]
fn training_graphs_are_sound_and_round_trip() {
    for seed in 0..60 {
        let options = GraphOptions {
            integer_linear: seed % 3 == 0,
            dropout: seed % 2 == 0,
            equal_layers: seed % 5 == 0,
            n_layers: 3,
            ..GraphOptions::default()
        };
        let forward = random_graph(seed, &options);
        let sequence = sequence_of(&forward).unwrap();
        let spec = TrainSpec {
            sequence,
            ..TrainSpec::default()
        };
        let training = ir::training::training_graph(&forward, &spec).unwrap();
        assert_eq!(verify(&training.graph), vec![], "seed {seed}");
        let text = round_trip(&training.graph);
        if options.equal_layers {
            // States, casts and passes repeat: the layers' origins are equal too.
            assert!(text.matches("repeat 3").count() >= 2, "{text}");
        }
    }
}

#[test]
fn origins_stand_behind_the_region() {
    let text = r#"graph "g" {
  layers "l.1", "l.2"
  %0 = state {decay: false, init: ones} : f32[2] @ w Update step_begin layer 0
  %1 = layout %0 : f32[2] @ p Update step_begin prepared of %0 layer 0
  %2 = layout %1 : f32[2] @ s Update step_begin shared of %0 layer 1
  repeat 2 as "l.{i}" from 1 (%prev0 = %2 then %3) {
    %3 = layout %prev0 : f32[2] @ l.{i}.a F microbatch boundary
    %4, %5 = unstack {dim: 0} %3 : f32[], f32[] @ l.{i}.b F microbatch
    %6, %7 = unstack {dim: 0} %3 : f32[], f32[] @ l.{i}.c Recompute microbatch twin of %4
    %8 = binary {f: add} %6, %7 : f32[] @ l.{i}.d BI microbatch sum 1 of %4
    %9 = unary {f: neg} %8 : f32[] @ l.{i}.e BW microbatch gradient 0 of %3
  }
}
"#;
    let graph = parse(text).unwrap();
    assert_eq!(print(&graph), text);
    let origins: Vec<Origin> = graph.ops().iter().map(|op| op.origin).collect();
    let of = |i| OpId::new(i);
    let in_layer = |first: usize| {
        [
            Origin::Boundary,
            Origin::Forward,
            Origin::Twin { of: of(first + 1) },
            Origin::Sum {
                of: of(first + 1),
                result: 1,
            },
            Origin::Gradient {
                of: of(first),
                operand: 0,
            },
        ]
    };
    assert_eq!(origins[..3], {
        let of = of(0);
        [
            Origin::Forward,
            Origin::Prepared { of },
            Origin::Shared { of },
        ]
    });
    assert_eq!(origins[3..], [in_layer(3), in_layer(8)].concat());
    // Any result stands for its op; the first is written.
    let other = text.replace("sum 1 of %4", "sum 1 of %5");
    assert_eq!(print(&parse(&other).unwrap()), text);
    // A text without layers may have origins too.
    let bare = r#"graph "g" { %0 = constant {value: 1} : f32[] @ a F microbatch loss }"#;
    assert_eq!(parse(bare).unwrap().ops()[0].origin, Origin::Loss);
}

/// Every op kind of forward graphs occurs, and in the linear family only what keeps integers.
#[test]
fn generated_op_kinds() {
    let kinds = |integer_linear: bool| {
        let options = GraphOptions {
            integer_linear,
            dropout: true,
            reduce_max: true,
            experts: true,
            images: true,
            state_spaces: true,
            ..GraphOptions::default()
        };
        let names = (0..200).flat_map(|seed| {
            let graph = random_graph(seed, &options);
            graph
                .ops()
                .iter()
                .map(|op| op.kind.name())
                .collect::<Vec<_>>()
        });
        names
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(
        kinds(false),
        "attention binary broadcast cast causal_conv clamped_swiglu combine constant conv2d cross_entropy dispatch dot_general dropout \
         embedding expert_bias group_norm input join layer_norm layout log_sum_exp max_pool2d pad reduce reshape rms_norm rotary route scale_rows slice stack state state_space transpose \
         unary unstack"
    );
    assert_eq!(
        kinds(true),
        "binary dot_general embedding input layout pad reduce reshape slice stack state transpose unary unstack"
    );
}

#[test]
fn equal_layers_are_written_once() {
    let expected = r#"graph "stack \"of\" layers\n" {
  layers "embed", "h.{i}" from 0 to 95, "head"
  %0 = input {kind: tokens} : i32[B,8] @ tokens F microbatch layer 0
  %1 = state {decay: true, init: {normal: {std: 0.02}}} : f32[50,4] @ table Update step_begin layer 0
  %2 = embedding %1, %0 : f32[B,8,4] @ rows F microbatch layer 0
  repeat 96 as "h.{i}" from 0 (%prev0 = %2 then %7) {
    %3 = state {decay: true, init: {normal: {std: 0.02}}} : f32[4,4] @ model.h.{i}.w Update step_begin
    %4 = dot_general {einsum: "bsh,hf->bsf"} %prev0, %3 : f32[B,8,4] @ model.h.{i}.dot F microbatch
    %5 = unary {f: gelu_tanh} %4 : f32[B,8,4] @ model.h.{i}.gelu F microbatch
    %6 = dropout {key: "model.h.{i}.drop", p: 0.1} %5 : f32[B,8,4] @ model.h.{i}.drop F microbatch
    %7 = binary {f: add} %prev0, %6 : f32[B,8,4] @ model.h.{i}.add F microbatch
  }
  %483 = dot_general {einsum: "bsh,vh->bsv"} %482, %1 : f32[B,8,50] @ logits F microbatch layer 97
  return %483
}
"#;
    assert_eq!(round_trip(&stack(96, false)), expected);
}

#[test]
fn states_before_the_layers_are_read_in_strides() {
    let text = round_trip(&stack(12, true));
    assert_eq!(text.matches("repeat 12").count(), 2, "{text}");
    assert!(text.contains("%prev0, %2[+1] :"), "{text}");
}

#[test]
fn two_layers_fold_and_one_does_not() {
    assert!(round_trip(&stack(2, false)).contains("repeat 2 as"));
    assert!(!round_trip(&stack(1, false)).contains("repeat"));
}

#[test]
fn blocks_are_written_and_read() {
    let of = |blocks: &str| {
        let bounds = format!("bounds: {{blocks: {{{blocks}}}}}");
        format!(
            "graph \"g\" {{\n  \
             %q = state {{decay: true, init: zeros}} : f32[8,2,4] @ q Update step_begin\n  \
             %x = broadcast {{leading: [\"B\"]}} %q : f32[B,8,2,4] @ x F microbatch\n  \
             %o, %lse = attention {{{bounds}, dropout: 0.0, scale: 0.5}} %x, %x, %x : \
             f32[B,8,2,4], f32[B,8,2] @ attend F microbatch\n  \
             return %o\n}}\n"
        )
    };
    let read = |blocks: &str| parse(&of(blocks)).map_err(|e| e.to_string());
    let seen = |g: Graph| g.ops().iter().find_map(|op| op.kind.bounds()?.blocks);
    let g = read("local: 2, size: 3").unwrap();
    let text = round_trip(&g);
    assert!(
        text.contains("bounds: {blocks: {local: 2, size: 3}}"),
        "{text}"
    );
    let short = seen(g).unwrap();
    assert_eq!((short.aligned, short.first, short.last), (false, 0, 0));
    let g = read("aligned: true, first: 1, last: 2, local: 4, size: 1").unwrap();
    round_trip(&g);
    let long = seen(g).unwrap();
    assert_eq!((long.aligned, long.first, long.last), (true, 1, 2));
    for (blocks, problem) in [
        ("local: 2, size: 0", "blocks of no tokens"),
        ("local: 0, size: 1", "no local blocks"),
        ("last: 3, local: 2, size: 1", "the last 3 blocks of each 2"),
        ("frist: 1, local: 2, size: 1", "frist"),
        ("size: 1", "local"),
    ] {
        let error = read(blocks).unwrap_err();
        assert!(error.contains(problem), "{blocks}: {error}");
    }
}

#[test]
fn layers_that_fall_fold() {
    let mut g = stack(5, false);
    let mut x = g.outputs[0];
    for i in (0..5).rev() {
        let layer = Some(LayerId::new(i + 1));
        let place = Place {
            path: format!("grad.h.{i}.x"),
            pass: Pass::BI,
            region: Region::Microbatch,
            layer,
        };
        x = g.add1(OpKind::Layout, &[x], place).unwrap();
    }
    let text = round_trip(&g);
    assert!(
        text.contains("repeat 5 as \"h.{i}\" from 4 down (%prev0 = %28 then %29)"),
        "{text}"
    );
}

/// A difference in one layer, of any kind, leaves the graph's meaning alone.
#[test]
fn unequal_layers_are_written_flat() {
    let chain = |odd: &dyn Fn(usize) -> (OpKind, String)| {
        let mut g = Graph::new("chain");
        let start = g.add_layer("start");
        let layers: Vec<LayerId> = (0..6).map(|i| g.add_layer(format!("h.{i}"))).collect();
        let x = state(&mut g, "x".into(), &[4], start);
        let leading = vec![Dim::Batch];
        let place = Place::forward("samples", start);
        let mut x = g.add1(OpKind::Broadcast { leading }, &[x], place).unwrap();
        for (i, &l) in layers.iter().enumerate() {
            let (kind, path) = odd(i);
            x = g.add1(kind, &[x], Place::forward(path, l)).unwrap();
        }
        g.outputs = vec![x];
        round_trip(&g)
    };
    let path = |i: usize| format!("h.{i}.op");
    let scale = |by: f64| OpKind::Unary {
        f: Unary::Scale { by },
    };
    assert!(chain(&|i| (scale(2.5), path(i))).contains("repeat 6"));
    // Attributes.
    let text = chain(&|i| (scale(if i == 3 { 2.5 } else { 1.5 }), path(i)));
    assert!(
        text.contains("repeat 3 as \"h.{i}\" from 0")
            && text.contains("repeat 2 as \"h.{i}\" from 4"),
        "{text}"
    );
    // Paths without the layer's name, or with it inside a component.
    assert!(!chain(&|i| (scale(2.5), format!("op{i}"))).contains("repeat"));
    assert!(!chain(&|i| (scale(2.5), format!("xh.{i}.op"))).contains("repeat"));
    assert!(!chain(&|i| (scale(2.5), format!("h.{i}0.op"))).contains("repeat"));
    // A key with the layer's name twice, a key with a hole, and one that is the same in all.
    let order = ir::op::SequenceOrder::Natural;
    let key = |key: String| OpKind::Dropout { p: 0.5, key, order };
    assert!(chain(&|i| (key(format!("h.{i}.a.h.{i}")), path(i))).contains("\"h.{i}.a.h.{i}\""));
    assert!(!chain(&|i| (key("a{i}".into()), path(i))).contains("repeat"));
    assert!(chain(&|i| (key("h.0.a".into()), path(i))).contains("key: \"h.0.a\""));
    assert!(!chain(&|i| (key(format!("h.{}.a", 5 - i)), path(i))).contains("repeat 6"));
}

#[test]
fn names_of_layers_of_any_kind() {
    let lists: [&[&str]; 8] = [
        &["a", "b", "a"],
        &["h.{i}", "h.1", "h.2", "h.3"],
        &["{i}0", "{i}1", "{i}2"],
        &["h.8", "h.9", "h.10", "h.11", "h.13"],
        &["h.01", "h.02", "h.03"],
        &["é1", "è2", "é3", "日本 4", "日本 5", "日本 6"],
        &[
            "",
            "\"",
            "\\",
            "\u{7}",
            "4294967294",
            "4294967295",
            "4294967296",
        ],
        &["s1.b1", "s1.b2", "s1.b3", "s2.b1", "s3.b1"],
    ];
    for names in lists {
        let mut g = Graph::new("layers");
        for (i, name) in names.iter().enumerate() {
            let layer = g.add_layer(*name);
            state(&mut g, format!("{i}.w"), &[2], layer);
            state(
                &mut g,
                format!(
                    "v.{}.w",
                    name.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-")
                        .to_string()
                        + &format!(":{i}")
                ),
                &[2],
                layer,
            );
        }
        round_trip(&g);
    }
}

#[test]
fn floats_are_exact() {
    let mut rng = Rng::new(7);
    let mut g = Graph::new("floats");
    let layer = g.add_layer("l");
    let mut values = vec![
        0.1,
        1e-5,
        1e300,
        5e-324,
        f64::MIN_POSITIVE,
        f64::MAX,
        -0.0,
        1.0 / 3.0,
        1e15,
        1e16,
        123456789.0,
    ];
    values.extend(
        (0..2000)
            .map(|_| f64::from_bits(rng.next()))
            .filter(|x| x.is_finite()),
    );
    for (i, value) in values.iter().enumerate() {
        g.add(
            OpKind::Constant { value: *value },
            &[],
            Place::forward(format!("c{i}"), layer),
        )
        .unwrap();
    }
    let text = round_trip(&g);
    for (op, value) in parse(&text).unwrap().ops().iter().zip(values) {
        let OpKind::Constant { value: read } = op.kind else {
            panic!()
        };
        assert_eq!(read.to_bits(), value.to_bits());
    }
}

#[test]
fn dims_and_the_world() {
    let mut g = Graph::new("");
    let layer = g.add_layer("l");
    let w = state(&mut g, "w".into(), &[6, 1], layer);
    let x = g
        .add1(
            OpKind::Broadcast {
                leading: vec![Dim::Batch, Dim::Fixed(2)],
            },
            &[w],
            Place::forward("x", layer),
        )
        .unwrap();
    let shape = vec![Dim::Batch, Dim::Fixed(12)];
    g.add1(OpKind::Reshape { shape }, &[x], Place::forward("y", layer))
        .unwrap();
    let squares = Place {
        path: "q".into(),
        pass: Pass::Update,
        region: Region::StepEnd,
        layer: Some(layer),
    };
    let q = g.add1(OpKind::SumSquares, &[w], squares).unwrap();
    let world = |path: &str| Place {
        path: path.into(),
        pass: Pass::Update,
        region: Region::StepEnd,
        layer: None,
    };
    let norm = g.add1(OpKind::GlobalNorm, &[q, q], world("norm")).unwrap();
    g.add1(
        OpKind::ClipCoefficient { max_norm: None },
        &[norm, q],
        world("clip"),
    )
    .unwrap();
    g.add1(
        OpKind::ClipCoefficient {
            max_norm: Some(1.0),
        },
        &[norm, q],
        world("clip2"),
    )
    .unwrap();
    assert_eq!(
        round_trip(&g),
        r#"graph "" {
  layers "l"
  %0 = state {decay: true, init: {normal: {std: 0.02}}} : f32[6,1] @ w Update step_begin layer 0
  %1 = broadcast {leading: <B,2>} %0 : f32[B,2,6,1] @ x F microbatch layer 0
  %2 = reshape {shape: <B,12>} %1 : f32[B,12] @ y F microbatch layer 0
  %3 = sum_squares %0 : f32[] @ q Update step_end layer 0
  %4 = global_norm %3, %3 : f32[] @ norm Update step_end world
  %5 = clip_coefficient {max_norm: null} %4, %3 : f32[] @ clip Update step_end world
  %6 = clip_coefficient {max_norm: 1.0} %4, %3 : f32[] @ clip2 Update step_end world
}
"#
    );
    round_trip(&Graph::new("empty"));
}

/// The example of the module header is a graph in canonical form.
#[test]
fn documented_example() {
    let lines = include_str!("../src/text/mod.rs").lines();
    let inside = lines.skip_while(|l| !l.ends_with("```text")).skip(1);
    let example: Vec<&str> = inside
        .take_while(|l| !l.ends_with("```"))
        .map(|l| l.strip_prefix("//! ").unwrap())
        .collect();
    let text = example.join("\n") + "\n";
    let graph = parse(&text).unwrap();
    assert_eq!(print(&graph), text);
    assert_eq!(verify(&graph), vec![]);
}

#[test]
fn hand_written_text() {
    let text = r#"
    // Names instead of numbers, comments, any white space.
    graph "hand" { layers "l.1", "l.2", "l.3"
      %w = state {init: ones, decay: false} : f32[4] @ w Update step_begin layer 0
      repeat 3 as "l.{i}" from 1 (%x = %w then %y) { // Three layers.
        %n = unary {"f": neg} %x : f32[4] @ l.{i}.n F microbatch
        %y = binary {f: add} %x, %n : f32[4] @ l.{i}.y F microbatch
      }
      return %y, %w }"#;
    let g = parse(text).unwrap();
    assert_eq!(g.ops().len(), 7);
    assert_eq!(g.outputs, [ValueId(6), ValueId(0)]);
    let ops = g.ops();
    assert_eq!(
        (ops[5].path.as_str(), ops[5].inputs[0], ops[5].layer),
        ("l.3.n", ValueId(4), Some(LayerId(2)))
    );
    round_trip(&g);
}

/// A graph with this line as its third.
fn with_line(line: &str) -> String {
    format!(
        "graph \"g\" {{\n  layers \"l\", \"h.0\", \"h.1\"\n  %0 = state {{decay: false, init: ones}} : f32[4,4] @ w Update step_begin layer 0\n{line}\n}}\n"
    )
}

#[test]
fn errors_name_place_and_reason() {
    let cases = [
        (
            "%1 = layouts %0 : f32[4,4] @ x F microbatch layer 0",
            "layouts",
            "4:6: there is no op `layouts`",
        ),
        (
            "%1 = layout %1 : f32[4,4] @ x F microbatch layer 0",
            "%1",
            "4:13: value %1 is not defined before its use",
        ),
        (
            "%1 = layout %a : f32[4,4] @ x F microbatch layer 0",
            "%a",
            "4:13: no value is called `%a`",
        ),
        (
            "%2 = layout %0 : f32[4,4] @ x F microbatch layer 0",
            "%2",
            "4:1: result %2 is out of order: the next number is %1",
        ),
        (
            "%1 = layout %0 : f32[4,5] @ x F microbatch layer 0",
            "f32[4,5]",
            "4:18: the results are f32[4,4], the text says f32[4,5]",
        ),
        (
            "%1, %2 = layout %0 : f32[4] @ x F microbatch layer 0",
            "f32[4]",
            "4:22: 2 results, but 1 types",
        ),
        (
            "%1 = layout %0 : f64[4,4] @ x F microbatch layer 0",
            "f64",
            "4:18: `f64` is not an element type",
        ),
        (
            "%1 = layout %0 : f32[4,4] @ w F microbatch layer 0",
            "%1 = layout %0 : f32[4,4] @ w F microbatch",
            "4:1: op path `w` is taken",
        ),
        (
            "%1 = layout %0 : f32[4,4] @ x G microbatch layer 0",
            "G",
            "4:31: `G` is not the pass",
        ),
        (
            "%1 = layout %0 : f32[4,4] @ x F never layer 0",
            "never",
            "4:33: `never` is not the region",
        ),
        (
            "%1 = layout %0 : f32[4,4] @ x F microbatch twin layer 0",
            "layer",
            "4:49: expected `of`, found `layer`",
        ),
        (
            "%1 = layout %0 : f32[4,4] @ x F microbatch twin of %1 layer 0",
            "%1",
            "4:52: value %1 is not defined before its use",
        ),
        (
            "%1 = layout %0 : f32[4,4] @ x BW microbatch gradient of %0 layer 0",
            "of",
            "4:54: expected the number of the operand or result, found `of`",
        ),
        (
            "%1 = layout %0 : f32[4,4] @ x BW microbatch sum 4294967296 of %0 layer 0",
            "4294967296",
            "4:49: the number is too large",
        ),
        (
            "%1 = layout %0 : f32[4,4] @ x F microbatch layer 3",
            "layer 3",
            "4:44: there is no layer 3; the graph has 3",
        ),
        (
            "%1 = layout %0 : f32[4,4] @ x F microbatch",
            "}",
            "5:1: expected `layer` and its number, or `world`",
        ),
        (
            "%1 = cast %0 : f32[4,4] @ x F microbatch layer 0",
            "cast",
            "4:6: op `cast` needs attributes",
        ),
        (
            "%1, %2 = attention {dropout: 0.0, scale: 1.0, order: zigzag} %0, %0, %0 : f32[4,4], f32[4] @ x F microbatch layer 0",
            "attention {dropout: 0.0, scale: 1.0, order: zigzag}",
            "4:10: attributes of `attention`: a name stands alone that needs figures",
        ),
        (
            "%1 = layout {a: 1} %0 : f32[4,4] @ x F microbatch layer 0",
            "layout {a: 1}",
            "4:6: op `layout` has no attributes",
        ),
        (
            "%1 = cast {dtype: f32, to: f32} %0 : f32[4,4] @ x F microbatch layer 0",
            "cast {dtype: f32, to: f32}",
            "4:6: op `cast` has no attribute `to`",
        ),
        (
            "%1 = cast {dtype: f32, dtype: f32} %0 : f32[4,4] @ x F microbatch layer 0",
            "dtype",
            "4:24: attribute `dtype` is given twice",
        ),
        (
            "%1 = constant {value: 1e999} : f32[] @ x F microbatch layer 0",
            "1e999",
            "4:23: `1e999` is not a number",
        ),
        (
            "%1 = constant {value: \"a} : f32[] @ x F microbatch layer 0",
            "\"a} : f32[] @ x F microbatch layer 0",
            "4:23: the string has no end",
        ),
        (
            "%1 = unary {f: [[[[[[[[[1]]]]]]]]]} %0 : f32[4,4] @ x F microbatch layer 0",
            "[",
            "4:23: attributes nest deeper than 8 levels",
        ),
        (
            "return %1",
            "%1",
            "4:8: value %1 is not defined before its use",
        ),
        (
            "repeat 2 as \"h\" from 0 {}",
            "repeat 2 as \"h\" from 0",
            "4:1: `h` has no `{i}` for the number",
        ),
        (
            "repeat 2 as \"h.{i}\" from 0 {}",
            "repeat 2 as \"h.{i}\" from 0",
            "4:1: the `repeat` has no ops",
        ),
        (
            "repeat 3 as \"h.{i}\" from 0 {\n%1 = layout %0 : f32[4,4] @ h.{i} F microbatch }",
            "repeat 3 as \"h.{i}\" from 0",
            "4:1: there is no layer `h.2`",
        ),
        (
            "repeat 99999999 as \"h.{i}\" from 0 {",
            "repeat 99999999 as \"h.{i}\" from 0",
            "4:1: 99999999 copies; from 1 to 1048576 are possible",
        ),
        (
            "repeat 2 as \"h.{i}\" from 0 { repeat",
            "repeat",
            "4:30: a `repeat` stands inside a `repeat`",
        ),
        (
            "repeat 2 as \"h.{i}\" from 0 (%x = %0 then %9) {\n%1 = layout %0 : f32[4,4] @ h.{i} F microbatch }",
            "%9",
            "4:42: %9 is not a value of the body",
        ),
        (
            "repeat 2 as \"h.{i}\" from 0 {\n%1 = layout %0[-1] : f32[4,4] @ h.{i} F microbatch }",
            "%0[-1]",
            "5:13: value %-1 is not defined before its use in the copy with {i} = 1",
        ),
        (
            "repeat 2 as \"h.{i}\" from 0 {\n%1 = layout %0 : f32[4,4] @ h F microbatch }",
            "%1 = layout %0 : f32[4,4] @ h F microbatch",
            "5:1: op path `h` is taken in the copy with {i} = 1",
        ),
        ("}\n}", "}", "5:1: expected the end of the text, found `}`"),
        ("é", "é", "4:1: expected an op, `repeat`, `return` or `}`"),
    ];
    for (line, at, message) in cases {
        assert_eq!(
            failure(&with_line(line)),
            (at.to_string(), message.to_string()),
            "{line}"
        );
    }
    assert_eq!(
        failure(""),
        (
            String::new(),
            "1:1: expected `graph`, found the end of the text".to_string()
        )
    );
    let help = parse(&with_line(
        "%1 = layouts %0 : f32[4,4] @ x F microbatch layer 0",
    ))
    .unwrap_err()
    .help
    .unwrap();
    assert!(help.starts_with("the ops are `input`, `state`"), "{help}");
}

#[test]
fn expansion_is_limited() {
    let start = std::time::Instant::now();
    let layers = |rest: &str| format!("graph \"g\" {{ layers \"h.{{i}}\" from 0 to {rest}");
    assert!(
        failure(&layers("65536 }"))
            .1
            .contains("more than 65536 layers")
    );
    // 60,000 copies of a line of 10,000 bytes.
    let long = "x".repeat(10_000);
    let body = format!(
        "%0 = state {{decay: false, init: ones}} : f32[] @ h.{{i}}.{long} Update step_begin"
    );
    let text = layers(&format!(
        "65000 repeat 60000 as \"h.{{i}}\" from 0 {{ {body} }} }}"
    ));
    assert!(failure(&text).1.contains("stands for more than"));
    let body: String = (0..20).map(|i| format!("%{i} = state {{decay: false, init: ones}} : f32[] @ h.{{i}}.{i} Update step_begin\n")).collect();
    let text = layers(&format!(
        "65000 repeat 60000 as \"h.{{i}}\" from 0 {{ {body} }} }}"
    ));
    assert!(failure(&text).1.contains("more than 1048576 ops"));
    let deep = format!("graph \"g\" {{ %0 = unary {}", "{f: ".repeat(1_000_000));
    assert!(failure(&deep).1.contains("nest deeper"));
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

/// Without `layers`, ops and bodies need none and belong to one layer; numbers still count.
#[test]
fn a_text_without_layers_has_one() {
    let text = r#"graph "g" {
      %w = state {decay: true, init: ones} : f32[4,4] @ w Update step_begin
      repeat 3 as "l.{i}" from 1 (%x = %w then %y) {
        %y = layout %x : f32[4,4] @ l.{i}.y F microbatch
      }
      %z = layout %y : f32[4,4] @ z F microbatch layer 0
      %n = constant {value: 1.0} : f32[] @ n Update step_end world
      return %z
    }"#;
    let graph = parse(text).unwrap();
    assert_eq!(graph.layers, ["all"]);
    let layers: Vec<Option<LayerId>> = graph.ops().iter().map(|op| op.layer).collect();
    let only = Some(LayerId::new(0));
    assert_eq!(layers, [only, only, only, only, only, None]);
    assert_eq!(parse(&print(&graph)).unwrap(), graph);
    // A text that declares layers must say which one.
    let declared = text.replacen('{', "{\n layers \"a\"", 1);
    let (_, message) = failure(&declared);
    assert!(
        message.contains("expected `layer` and its number"),
        "{message}"
    );
    // Nothing to number.
    let (_, message) = failure(&text.replace(
        "%w = state {decay: true, init: ones} : f32[4,4] @ w Update step_begin",
        "%w = state {decay: true, init: ones} : f32[4,4] @ w Update step_begin layer 0",
    ));
    assert!(
        message.contains("there is no layer 0; the graph has 0"),
        "{message}"
    );
}
