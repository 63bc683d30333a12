//! Plans for other software, from the command line on: whose figures they are, that every verb that
//! prices a plan says the same, and that what is planned for some software it can express.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use support::Place;

/// Llama-3.1 8B on a host of eight, of one set of degrees.
const COMPILE: [&str; 18] = [
    "compile",
    "llama-3.1-8b",
    "--cluster",
    "dgx-h100",
    "--global-batch",
    "32",
    "--sequence",
    "4096",
    "--precision",
    "bf16",
    "--for",
    "megatron-core",
    "--pin",
    "data=4 tensor=2 pipeline=1 zero=1 microbatch=4",
    "--pin",
    "recompute=full",
    "-o",
    "plan.json",
];

#[test]
fn every_verb_says_whose_figures_they_are_and_the_same_ones() {
    let place = Place::new();
    let done = place.run(&COMPILE).expect(0);
    let first = |text: &str| text.lines().next().unwrap_or_default().to_string();
    let whose = "For Megatron-Core (2025): ";
    assert!(first(&done.out).starts_with(whose), "{}", done.out);
    // By the name that the user gave, not that of its family.
    assert!(
        first(&done.out).contains("llama-3.1-8b on 8 of"),
        "{}",
        done.out
    );
    let read = |args: &[&str]| place.run(args).expect(0);
    let inspected = read(&["inspect", "plan.json", "--json"]).json();
    let step_s = inspected["predicted"]["step_time_s"].as_f64().unwrap();
    let peak = inspected["predicted"]["stages"][0]["peak_bytes"].clone();
    let simulated = read(&["simulate", "plan.json", "--json"]).json();
    assert_eq!(simulated["predicted"]["step_time_s"].as_f64(), Some(step_s));
    assert_eq!(simulated["predicted"]["stages"][0]["peak_bytes"], peak);
    let explained = read(&["explain", "plan.json", "--json"]).json();
    let accounted = explained["step_time_s"].as_f64().unwrap();
    assert!(
        (accounted / step_s - 1.0).abs() < 1e-9,
        "{accounted} {step_s}"
    );
    for verb in ["inspect", "simulate", "explain"] {
        let said = read(&[verb, "plan.json"]).out;
        assert!(first(&said).starts_with(whose), "{verb}: {said}");
    }
    // Nothing is predicted to take less than it takes at least.
    let roofline = read(&["explain", "plan.json", "--roofline", "--json"]).json();
    let meshes = roofline["roofline"]["meshes"].as_array().unwrap();
    let rows = meshes.iter().flat_map(|m| m["rows"].as_array().unwrap());
    for row in rows.chain(meshes.iter().map(|m| &m["total"])) {
        let [floor, predicted] = ["floor_s", "predicted_s"].map(|key| row[key].as_f64());
        let is_over = floor.is_some_and(|floor| floor > predicted.unwrap() * (1.0 + 1e-6));
        assert!(!is_over, "{row}");
    }
    assert!(meshes[0]["total"]["fused"].as_u64() > Some(0), "{meshes:?}");
    // The words of Megatron-LM, with the plan's values.
    let words = read(&["inspect", "plan.json"]).out;
    for part in [
        "--micro-batch-size",
        "gradient accumulation",
        "--tensor-model-parallel-size",
        "distributed optimizer (ZeRO-1)",
        "What its processes hold",
    ] {
        assert!(words.contains(part), "`{part}` is not in:\n{words}");
    }
    let knobs = inspected["knobs"].as_array().unwrap();
    let value = |what: &str| {
        let knob = knobs.iter().find(|k| k["what"] == what);
        knob.unwrap()["value"].clone()
    };
    assert_eq!(value("micro-batch size"), "1");
    assert_eq!(value("gradient accumulation"), "8");
    assert_eq!(value("tensor parallel"), "2");
    read(&["check", "plan.json"]);
    // Megatron-LM does all of it: gradients are summed and sent in f32, its default and the plan's price.
    let exported = read(&["export", "plan.json", "--to", "megatron-core", "--json"]).json();
    let otherwise = exported["not_expressed"].as_array().unwrap();
    assert!(otherwise.is_empty(), "{exported}");
    let script = String::from_utf8(place.read("export-megatron-core/launch.sh")).unwrap();
    assert!(!script.contains("grad-reduce-in-bf16"), "{script}");
    // So the script is read as the plan that it is of, and takes as long.
    let args = [
        "import-job",
        "export-megatron-core/launch.sh",
        "--cluster",
        "dgx-h100",
        "--no-search",
    ];
    let imported = read(&[&args[..], &["--json"]].concat()).json();
    let again = imported["predicted"]["step_time_s"].as_f64();
    assert!(
        again.is_some_and(|s| (s / step_s - 1.0).abs() < 0.01),
        "{again:?} {step_s}"
    );
}

/// Software that has no model of the family is said to have none before any figure.
#[test]
fn the_first_line_says_that_torchtitan_has_no_such_model() {
    let place = Place::new();
    let mut args = COMPILE.to_vec();
    args[1] = "gpt2-xl";
    args[7] = "1024";
    (args[11], args[13]) = ("torchtitan", "data=8 zero=3 microbatch=8");
    let done = place.run(&args).expect(0);
    let whose = "For torchtitan (2025), which has no model of the family gpt2: gpt2-xl on 8 of";
    assert!(done.out.starts_with(whose), "{}", done.out);
    for verb in ["inspect", "simulate", "explain"] {
        let said = place.run(&[verb, "plan.json"]).expect(0).out;
        assert!(said.starts_with(&whose[..60]), "{verb}: {said}");
    }
}

/// A model for which Megatron-LM has no flags is said to have none before any figure, with what its plan
/// can be written for, and so does the export.
#[test]
fn the_first_lines_say_that_megatron_has_no_flags_for_a_model() {
    let place = Place::new();
    let mut args = COMPILE.to_vec();
    args[1] = "bloom-560m";
    args[7] = "1024";
    let said = place.run(&args).expect(0).out;
    let first = "For Megatron-Core (2025), which has no flags for this model: bloom-560m on 8 of";
    assert!(said.starts_with(first), "{said}");
    let why = "Export will not write this plan: Megatron-Core cannot express the plan's model: scores of \
               the model's attention fall with the distance (ALiBi), for which there are no flags; \
               `export --to` deepspeed or jax writes this plan.";
    for verb in ["compile", "inspect"] {
        let said = match verb {
            "compile" => said.clone(),
            _ => place.run(&[verb, "plan.json"]).expect(0).out,
        };
        let head: Vec<&str> = said.lines().take(6).collect();
        assert!(
            support::flat(&head.join("\n")).contains(why),
            "{verb}: {said}"
        );
        support::assert_fits(&said);
    }
    for verb in ["simulate", "explain"] {
        let said = place.run(&[verb, "plan.json"]).expect(0).out;
        assert!(said.starts_with(&first[..50]), "{verb}: {said}");
    }
    let export = ["export", "plan.json", "--to", "megatron-core"];
    let refused = place.refuses(&export, &[4]);
    refused.says(&["no pin helps", "`export --to` deepspeed or jax"]);
    let refused = place.refuses(&["export", "plan.json", "--to", "fsdp2"], &[4]);
    refused.says(&["the names of the family bloom in transformers are not known"]);
    place
        .run(&["export", "plan.json", "--to", "deepspeed"])
        .expect(0);
}

/// An option for the matmuls of some ops has to name one; not each number of its range has to.
#[test]
fn options_for_some_ops_name_a_matmul() {
    let place = Place::new();
    let of = |option: &str| {
        let made_for = format!("nemo+fp8+{option}");
        let mut args: Vec<String> = ["compile", "llama-3.1-8b", "--cluster", "dgx-h100:1"]
            .map(String::from)
            .to_vec();
        args.extend(["--global-batch", "32", "--sequence", "4096"].map(String::from));
        args.extend(["--precision", "bf16", "-o", "some.json", "--for"].map(String::from));
        args.push(made_for);
        args
    };
    let none = of("wide=h.[0-3].mamba.*");
    let none: Vec<&str> = none.iter().map(String::as_str).collect();
    let refused = place.refuses(&none, &[2, 3]);
    refused.says(&["no matrix product of the model is `h.0.mamba.*` to `h.3.mamba.*`"]);
    let some = of("wide=h.[30-40].attn.*");
    let args: Vec<&str> = some.iter().map(String::as_str).collect();
    let done = place.run(&args).expect(0);
    assert!(done.out.contains("wide=h.[30-40].attn.*"), "{}", done.out);
}

/// The program that is proved again is the one that was planned: that software's, which has its own
/// order of gathers.
#[test]
fn plans_with_gathers_in_backward_passes_are_checked_again() {
    let place = Place::new();
    for software in ["fsdp2", "torchtitan", "jax", "megatron-core"] {
        let mut args = COMPILE.to_vec();
        (args[1], args[11]) = ("llama-3.2-1b", software);
        args[13] = "data=8 tensor=1 pipeline=1 zero=3 microbatch=8";
        place.run(&args).expect(0);
        place.run(&["check", "plan.json"]).expect(0);
    }
}

/// Experts are most of a model's bytes and lie over the data ranks: the level of all that these hold copies
/// of is said all the same.
#[test]
fn plans_with_experts_say_their_zero_level() {
    let place = Place::new();
    let mut args = COMPILE.to_vec();
    args[1] = "qwen3-30b-a3b";
    args[13] = "data=4 expert=4 tensor=2 pipeline=1 zero=1 microbatch=4";
    place.run(&args).expect(0);
    let words = support::flat(&place.run(&["inspect", "plan.json"]).expect(0).out);
    let said = "expert parallel in moe.gate, moe.up, moe.down, ZeRO-1 for the other parameters";
    assert!(words.contains(said), "{words}");
    let why = support::flat(&place.run(&["explain", "plan.json"]).expect(0).out);
    assert!(why.contains("expert=8 pipeline=1 zero=1 "), "{why}");
}

/// `--for deepspeed` plans whatever `export` writes for DeepSpeed: ranks that split sequences exchange
/// tokens for heads.
#[test]
fn sequences_that_deepspeed_splits_are_planned_and_exported() {
    let place = Place::new();
    let mut args = COMPILE.to_vec();
    (args[11], args[13]) = ("deepspeed", "data=4 context=2 zero=3 microbatch=4");
    place.run(&args).expect(0);
    let words = place.run(&["inspect", "plan.json"]).expect(0).out;
    assert!(words.contains("sequence_parallel_size"), "{words}");
    let exported = place
        .run(&["export", "plan.json", "--to", "deepspeed", "--json"])
        .expect(0)
        .json();
    let config = place.read("export-deepspeed/ds_config.json");
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["sequence_parallel_size"], 2);
    let otherwise = exported["not_expressed"].as_array().unwrap();
    let mut places = otherwise.iter().map(|n| n["where"].to_string());
    assert!(!places.any(|p| p.contains("attention")), "{exported}");
    args[15] = "context_attention=ring";
    place
        .run(&args)
        .expect(2)
        .says(&["cannot express context_attention=ring"]);
}

#[test]
fn the_same_degrees_take_longer_under_older_software() {
    let place = Place::new();
    let step_s = |made_for: &str| {
        let mut args = COMPILE.to_vec();
        args[11] = made_for;
        args.push("--json");
        let done = place.run(&args).expect(0).json();
        done["predicted"]["step_time_s"].as_f64().unwrap()
    };
    // Attention was not fused then, and gradients were not summed beside the backward pass.
    assert!(step_s("megatron-core@2022") > 1.2 * step_s("megatron-core"));
}

#[test]
fn software_that_is_not_known_has_a_suggestion() {
    let place = Place::new();
    let with = |made_for: &str| {
        let mut args = COMPILE.to_vec();
        args[11] = made_for;
        place.run(&args).expect(2)
    };
    with("megatron").says(&["did you mean `megatron-core`?"]);
    with("torchtitan@2019").says(&["no version `2019` of torchtitan", "known are 2025"]);
    with("nemo+deepp").says(&["no software has the option `deepp`"]);
    assert!(!place.exists("plan.json"));
}

#[test]
fn what_software_cannot_express_is_refused() {
    let place = Place::new();
    let with = |made_for: &str, code: i32| {
        let mut args = COMPILE.to_vec();
        args[11] = made_for;
        place.run(&args).expect(code)
    };
    with("deepspeed", 2).says(&["DeepSpeed cannot express tensor=2"]);
    let mut args = COMPILE.to_vec();
    (args[1], args[3]) = ("config.json", "cluster.toml");
    let presets = place.run(&["presets", "dgx-h100"]).expect(0).out;
    place.write("cluster.toml", presets.as_bytes());
    args[5] = "4";
    args[7] = "16";
    place.run(&args).expect(0);
    // A plan whose software is not known to this version is told so.
    let mut plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    plan["for"]["version"] = "2095".into();
    place.write("later.json", plan.to_string().as_bytes());
    let done = place.run(&["simulate", "later.json"]).expect(5);
    done.says(&["for: there is no version `2095` of megatron-core"]);
}
