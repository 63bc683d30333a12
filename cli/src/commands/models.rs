//! `models`: the models that are built in.

use crate::args::ModelsArgs;
use crate::failure::{Exit, Failure};
use crate::{files, model, report};
use import::{ModelConfig, builtin};
use serde_json::json;
use std::path::Path;

pub fn run(args: &ModelsArgs) -> Result<(), Failure> {
    if let Some(name) = &args.name {
        return one(name);
    }
    let models = builtin::models().map(|(name, text)| Ok((name, model::parse_config(name, text)?)));
    let models = models.collect::<Result<Vec<(&str, ModelConfig)>, Failure>>()?;
    if args.json {
        let list = models.iter().map(|(name, c)| {
            json!({
                "name": name,
                "model_type": c.model_type(),
                "parameters": c.n_parameters(),
                "layers": c.n_layers(),
                "max_sequence": c.max_sequence(),
            })
        });
        return report::print_json(&list.collect::<Vec<_>>());
    }
    let row = |(name, c): &(&str, ModelConfig)| {
        vec![
            name.to_string(),
            c.model_type().to_string(),
            report::count(c.n_parameters() as f64),
            c.n_layers().to_string(),
            match c.max_sequence() {
                1 => "images".into(),
                tokens => tokens.to_string(),
            },
        ]
    };
    report::out(&report::table(
        &["model", "type", "parameters", "layers", "longest sequence"],
        models.iter().map(row).collect(),
        2,
    ))?;
    report::out(
        "`meshwright compile MODEL` plans for any of them, and `meshwright models MODEL` prints its config.json.\n\
         Any other model of these types is given by its own config.json, or the folder that has it.",
    )
}

/// Prints the configuration of a model.
fn one(name: &str) -> Result<(), Failure> {
    if let Some((_, text)) = builtin::find(name) {
        return report::document(text.trim_end());
    }
    let near = files::closest(name, builtin::names());
    let near = near.map(|near| format!("did you mean `{near}`? "));
    let what = match Path::new(name).exists() {
        true => format!("`{name}` is a file, not a model that is built in"),
        false => format!("there is no model `{name}` built in"),
    };
    Err(Failure::new(Exit::BadInput, what).help(format!(
        "{}`meshwright models` lists all",
        near.unwrap_or_default()
    )))
}
